// SPDX-License-Identifier: LGPL-3.0-or-later

// Command coredns is CoreDNS with the plugins that a cluster of ours uses, and none besides: the
// names of services and of their pods. It takes a Corefile by -conf, as the whole CoreDNS does.
//
// Its version, which ../generate chooses, is one that wants nothing newer than what Kubernetes is
// built with: so most of its packages are compiled once for both, and Kubernetes' stay as they are.
package main

import (
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/template"
)

func main() {
	coremain.Run()
}
