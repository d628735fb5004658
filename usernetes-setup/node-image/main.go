// SPDX-License-Identifier: LGPL-3.0-or-later

// Command node is every program of a node that kubeadm sets up, in one binary: it runs the one that it
// was called by, through a link such as kubeadm -> node. They share nearly all of their code, so that
// one binary is a quarter of the size of nine; a node image has it twice, for itself and in the
// images of kubeadm's static pods.
//
// The versions come from go.mod; `make` stamps them into the version packages by -ldflags.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	helm "helm.sh/helm/v4/pkg/cmd"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubeadm "k8s.io/kubernetes/cmd/kubeadm/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func component(make func() *cobra.Command) func() {
	return func() { os.Exit(cli.Run(make())) }
}

var programs = map[string]func(){
	"etcd": func() { etcdmain.Main(os.Args) },
	"helm": func() {
		command, err := helm.NewRootCmd(os.Stdout, os.Args[1:], helm.SetupLogging)
		if err == nil {
			err = command.Execute()
		}
		if err != nil {
			os.Exit(1)
		}
	},
	"kube-apiserver":          component(apiserver.NewAPIServerCommand),
	"kube-controller-manager": component(manager.NewControllerManagerCommand),
	"kube-proxy":              component(proxy.NewProxyCommand),
	"kube-scheduler":          component(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
	"kubeadm":                 func() { util.CheckErr(kubeadm.Run()) },
	"kubectl":                 func() { util.CheckErr(cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand())) },
	"kubelet":                 component(func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) }),
}

func main() {
	program := programs[filepath.Base(os.Args[0])]
	if program == nil {
		fmt.Fprintln(os.Stderr, "node: call it as a program of a node, such as kubeadm")
		os.Exit(2)
	}
	program()
}
