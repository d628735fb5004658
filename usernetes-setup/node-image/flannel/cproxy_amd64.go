// SPDX-License-Identifier: LGPL-3.0-or-later

// Package udp takes the place of the one part of flannel that is written in C, so that no C compiler is
// needed and the program is static: `make` puts it there. Its backend, which is not Usernetes', ends.
package udp

import (
	"net"
	"os"

	"github.com/flannel-io/flannel/pkg/ip"
	log "k8s.io/klog/v2"
)

func runCProxy(*os.File, *net.UDPConn, *os.File, ip.IP4, int) {
	log.Fatal("this flannel was built without its backend udp")
}

func setRoute(*os.File, ip.IP4Net, ip.IP4, int) {}

func removeRoute(*os.File, ip.IP4Net) {}

func stopProxy(*os.File) {}
