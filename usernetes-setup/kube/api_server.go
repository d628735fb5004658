// SPDX-License-Identifier: LGPL-3.0-or-later

// The API server, as its own command starts it but for one thing: its descriptions of the API in
// OpenAPI are made when somebody asks for them, as kubectl does before it applies or explains, and
// not while it starts. They take a quarter of that time, and a third of its memory then and later.
package main

import (
	"net/http"
	"sync"

	"github.com/emicklei/go-restful/v3"
	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/mux"
	"k8s.io/apiserver/pkg/server/routes"
	"k8s.io/client-go/rest"
	"k8s.io/component-base/compatibility"
	logs "k8s.io/component-base/logs/api/v1"
	"k8s.io/component-base/version/verflag"
	"k8s.io/kube-openapi/pkg/handler3"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"
)

func apiServer() *cobra.Command {
	wishes := options.NewServerRunOptions()
	command := &cobra.Command{
		Use:          "kube-apiserver",
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE:         func(*cobra.Command, []string) error { return serve(wishes) },
	}
	sets := wishes.Flags()
	verflag.AddFlags(sets.FlagSet("global"))
	for _, set := range sets.FlagSets {
		command.Flags().AddFlagSet(set)
	}
	return command
}

func serve(wishes *options.ServerRunOptions) error {
	verflag.PrintAndExitIfRequested()
	registry := wishes.GenericServerRunOptions.ComponentGlobalsRegistry
	if err := registry.Set(); err != nil {
		return err
	}
	rest.SetDefaultWarningHandler(rest.NoWarnings{}) // of what it asks itself
	gates := registry.FeatureGateFor(compatibility.DefaultKubeComponent)
	if err := logs.ValidateAndApply(wishes.Logs, gates); err != nil {
		return err
	}
	stopped := server.SetupSignalContext()
	whole, err := wishes.Complete(stopped)
	if err != nil {
		return err
	}
	if wrong := whole.Validate(); len(wrong) != 0 {
		return errors.NewAggregate(wrong)
	}
	config, err := app.NewConfig(whole)
	if err != nil {
		return err
	}
	own := config.KubeAPIs.ControlPlane.Generic
	own.SkipOpenAPIInstallation = true
	completed, err := config.Complete()
	if err != nil {
		return err
	}
	chain, err := app.CreateServerChain(completed)
	if err != nil {
		return err
	}
	describe(chain.GenericAPIServer.NextDelegate().(*server.GenericAPIServer),
		routes.OpenAPI{Config: own.OpenAPIConfig, V3Config: own.OpenAPIV3Config})
	prepared, err := chain.PrepareRun()
	if err != nil {
		return err
	}
	return prepared.Run(stopped)
}

// describe lets a server say what its own types are, under /openapi. The first server of the chain
// gathers that from those behind it for clients: of version 2 when one asks. Of version 3 it looks
// every second which groups there are, and the API server asks itself every five, for policies; so
// the list must cost nothing, and is without the digests of what it lists that are usual.
func describe(own *server.GenericAPIServer, documents routes.OpenAPI) {
	container, paths := own.Handler.GoRestfulContainer, own.Handler.NonGoRestfulMux
	whole := sync.OnceValue(func() http.Handler {
		made := mux.NewPathRecorderMux("openapi")
		documents.InstallV2(container, made)
		return made
	})
	paths.HandleFunc("/openapi/v2", func(answer http.ResponseWriter, question *http.Request) {
		whole().ServeHTTP(answer, question)
	})
	list := handler3.OpenAPIV3Discovery{Paths: map[string]handler3.OpenAPIV3DiscoveryGroupVersion{}}
	for _, service := range container.RegisteredWebServices() {
		path := "/openapi/v3" + service.RootPath()
		group := sync.OnceValue(func() http.Handler {
			alone, made := restful.NewContainer(), mux.NewPathRecorderMux("openapi")
			documents.InstallV3(alone.Add(service), made)
			return made
		})
		paths.HandleFunc(path, func(answer http.ResponseWriter, question *http.Request) {
			group().ServeHTTP(answer, question)
		})
		list.Paths[service.RootPath()[1:]] = handler3.OpenAPIV3DiscoveryGroupVersion{
			ServerRelativeURL: path,
		}
	}
	paths.HandleFunc("/openapi/v3", func(answer http.ResponseWriter, _ *http.Request) {
		responsewriters.WriteRawJSON(http.StatusOK, list, answer)
	})
}
