// SPDX-License-Identifier: LGPL-3.0-or-later

// Command registry is the registry of the CNCF distribution project, as far as the tests need it: it
// keeps images in a folder, and knows its users by a file of passwords.
// To move to another version: `go get github.com/distribution/distribution/v3@VERSION && go mod tidy`.
package main

import (
	"os"

	"github.com/distribution/distribution/v3/registry"
	_ "github.com/distribution/distribution/v3/registry/auth/htpasswd"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/filesystem"
)

func main() {
	if registry.RootCmd.Execute() != nil {
		os.Exit(1)
	}
}
