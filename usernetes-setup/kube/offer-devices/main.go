// SPDX-License-Identifier: LGPL-3.0-or-later

// Command offer-devices is a node's device plugin: it tells the kubelet which devices pods may ask
// for, and which device files a container gets. The kubelet counts them, and the container runtime
// makes the files in the container and lets its control group open them.
//
//	offer-devices devices.json
//
// The file has the units of each resource, where a unit is the device files that one container gets,
// and how many containers may have each unit at once:
//
//	{"dovetail/gpu": {"units": [["/dev/nvidia0", "/dev/nvidiactl"]], "each": 1},
//	 "dovetail/dev.fuse": {"units": [["/dev/fuse"]], "each": 16}}
//
// Invariant: it ends when the kubelet does, since that forgets all plugins, and when it cannot be
// reached; whoever started it then starts it again.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const patience = 10 * time.Second // for the kubelet to take a resource

type resource struct {
	Units [][]string `json:"units"`
	Each  int        `json:"each"`
}

// plugin offers one resource. What the kubelet counts are numbers: the first `Each` of them are the
// first unit, the next ones the second, and so on.
type plugin struct {
	api.UnimplementedDevicePluginServer
	resource
	over chan<- error
}

func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

// ListAndWatch says what there is, once, and stays as long as the kubelet does.
func (p *plugin) ListAndWatch(_ *api.Empty, stream api.DevicePlugin_ListAndWatchServer) error {
	all := &api.ListAndWatchResponse{}
	for number := range len(p.Units) * p.Each {
		all.Devices = append(all.Devices, &api.Device{ID: strconv.Itoa(number), Health: api.Healthy})
	}
	err := stream.Send(all)
	if err == nil {
		<-stream.Context().Done()
		err = errors.New("the kubelet has gone")
	}
	p.over <- err
	return err
}

func (p *plugin) Allocate(_ context.Context, asked *api.AllocateRequest) (*api.AllocateResponse, error) {
	answer := &api.AllocateResponse{}
	for _, container := range asked.ContainerRequests {
		given := &api.ContainerAllocateResponse{}
		seen := map[string]bool{}
		for _, id := range container.DevicesIds {
			number, err := strconv.Atoi(id)
			if err != nil || number < 0 || number >= len(p.Units)*p.Each {
				return nil, fmt.Errorf("there is no unit %q", id)
			}
			for _, path := range p.Units[number/p.Each] {
				if !seen[path] {
					given.Devices = append(given.Devices,
						&api.DeviceSpec{HostPath: path, ContainerPath: path, Permissions: "rw"})
				}
				seen[path] = true
			}
		}
		answer.ContainerResponses = append(answer.ContainerResponses, given)
	}
	return answer, nil
}

// offer serves one resource on a socket of its own, and has the kubelet know of it.
func offer(kubelet api.RegistrationClient, name, socket string, what resource, over chan<- error) error {
	if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, &plugin{resource: what, over: over})
	go func() { over <- server.Serve(listener) }()
	limit, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err = kubelet.Register(limit, &api.RegisterRequest{
		Version: api.Version, Endpoint: filepath.Base(socket), ResourceName: name,
	})
	return err
}

func run(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var offers map[string]resource
	if err := json.Unmarshal(text, &offers); err != nil {
		return err
	}
	connection, err := grpc.NewClient("unix://"+api.KubeletSocket,
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	kubelet, over := api.NewRegistrationClient(connection), make(chan error, 2*len(offers))
	number := 0
	for name, what := range offers {
		socket := fmt.Sprintf("%sdovetail-%d.sock", api.DevicePluginPath, number)
		if err := offer(kubelet, name, socket, what, over); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		number++
	}
	return <-over
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: offer-devices devices.json")
		os.Exit(2)
	}
	fmt.Fprintln(os.Stderr, "offer-devices:", run(os.Args[1]))
	os.Exit(1)
}
