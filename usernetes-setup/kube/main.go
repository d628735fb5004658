// SPDX-License-Identifier: LGPL-3.0-or-later

// Command kube is every Kubernetes component in one binary: it runs the one that
// it was called by, through a link such as kubelet -> kube, or as `kube kubelet ...`. The
// components share nearly all of their code, so one binary is a third of the size of five.
//
// The versions come from go.mod; `build` stamps them into the version packages by -ldflags.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"
	_ "time/tzdata" // for CronJobs on machines that have no time zones

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var components = map[string]func() *cobra.Command{
	"kube-apiserver":          apiServer,
	"kube-controller-manager": controllers,
	"kube-proxy":              proxy.NewProxyCommand,
	"kubectl":                 kubectl.NewDefaultKubectlCommand,
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

// frugal gives back, after the start and then each minute, the memory that the start or a busy time
// has taken: Go collects garbage once there is as much of it as of the rest, and who idles never gets
// there.
func frugal() {
	for wait := 20 * time.Second; ; wait = time.Minute {
		time.Sleep(wait)
		debug.FreeOSMemory()
	}
}

func main() {
	component := components[filepath.Base(os.Args[0])]
	if component == nil && len(os.Args) > 1 {
		component = components[os.Args[1]]
		os.Args = os.Args[1:]
	}
	if component == nil {
		fmt.Fprintln(os.Stderr, "kube: call it as a component, or name one: kubelet, kubectl, "+
			"kube-apiserver, kube-controller-manager, kube-proxy")
		os.Exit(2)
	}
	if filepath.Base(os.Args[0]) == "kubectl" { // it prints errors in its own way
		util.CheckErr(cli.RunNoErrOutput(component()))
		return
	}
	go frugal()
	os.Exit(cli.Run(component()))
}
