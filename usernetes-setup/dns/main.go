// SPDX-License-Identifier: LGPL-3.0-or-later

// Command coredns is CoreDNS with the plugins that a cluster of ours uses, and none besides: the
// names of services and of their pods. It takes a Corefile by -conf, as the whole CoreDNS does.
//
// A module of its own, since CoreDNS wants other versions of what Kubernetes is built with. Its
// version is in go.mod; to move to another: `go get github.com/coredns/coredns@VERSION && go mod tidy`.
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
