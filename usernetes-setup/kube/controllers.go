// SPDX-License-Identifier: LGPL-3.0-or-later

// The controller manager, with the scheduler in its process, which saves 20 MB of memory. Where one
// of them ends, the other does too, and both are started again.
package main

import (
	"context"
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	"k8s.io/kubernetes/cmd/kube-scheduler/app/options"
)

func controllers() *cobra.Command {
	command := manager.NewControllerManagerCommand()
	account := command.Flags().String("scheduler-kubeconfig", "", "How the scheduler asks the API.")
	manage := command.RunE
	command.RunE = func(command *cobra.Command, words []string) error {
		go func() {
			klog.ErrorS(schedule(*account), "The scheduler ended")
			klog.Flush()
			os.Exit(1)
		}()
		return manage(command, words)
	}
	return command
}

func schedule(account string) error {
	wishes := options.NewOptions()
	flags := pflag.NewFlagSet("kube-scheduler", pflag.ContinueOnError)
	for _, set := range wishes.Flags.FlagSets {
		flags.AddFlagSet(set)
	}
	err := flags.Parse([]string{"--kubeconfig=" + account, "--secure-port=0",
		"--leader-elect=false", "--profiling=false"})
	if err != nil {
		return err
	}
	forever := context.Background()
	config, ready, err := scheduler.Setup(forever, wishes)
	if err != nil {
		return err
	}
	// Its two roles, of which one is about volumes, are made a while after the API answers. Refused
	// once, it would wait for seconds.
	nodes, classes := config.Client.CoreV1().Nodes(), config.Client.StorageV1().StorageClasses()
	one := meta.ListOptions{Limit: 1}
	for tries := 1; ; tries++ {
		if _, err = nodes.List(forever, one); err == nil {
			if _, err = classes.List(forever, one); err == nil {
				return scheduler.Run(forever, config, ready)
			}
		}
		if tries%200 == 0 {
			klog.ErrorS(err, "The scheduler waits until it may list nodes and storage classes")
		}
		time.Sleep(50 * time.Millisecond)
	}
}
