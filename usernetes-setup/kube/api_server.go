// SPDX-License-Identifier: LGPL-3.0-or-later

// The API server, as its own command starts it but for one thing: its descriptions of the API in
// OpenAPI are made when somebody asks for them, as kubectl does before it applies or explains, and
// not while it starts. They take a quarter of that time, and a third of its memory then and later.
package main

import (
	"net/http"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/mux"
	"k8s.io/apiserver/pkg/server/routes"
	admission "k8s.io/client-go/listers/admissionregistration/v1"
	"k8s.io/client-go/rest"
	"k8s.io/component-base/compatibility"
	logs "k8s.io/component-base/logs/api/v1"
	"k8s.io/component-base/version/verflag"
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
	descriptions := describeOnDemand(config)
	completed, err := config.Complete()
	if err != nil {
		return err
	}
	chain, err := app.CreateServerChain(completed)
	if err != nil {
		return err
	}
	descriptions.install(chain.GenericAPIServer.NextDelegate().(*server.GenericAPIServer))
	prepared, err := chain.PrepareRun()
	if err != nil {
		return err
	}
	return prepared.Run(stopped)
}

// onDemand serves what describes the API server's own types, under /openapi.
//
// Clients ask the first server of the chain, which gathers it from those behind. Of version 3 it
// looks every second what there is, from the start, and would so ask for all of it. The server
// also asks itself, every five seconds, and reads the answer if there are policies that change
// what is admitted.
type onDemand struct {
	routes.OpenAPI
	server        *server.GenericAPIServer
	policies      admission.MutatingAdmissionPolicyLister
	made          *mux.PathRecorderMux
	second, third func()        // make a version, the first time
	wanted, known chan struct{} // closed once the third is made, and once the first server knows
	tell          func()        // closes the latter
}

func describeOnDemand(config *app.Config) *onDemand {
	own := config.KubeAPIs.ControlPlane
	own.Generic.SkipOpenAPIInstallation = true
	d := &onDemand{
		OpenAPI: routes.OpenAPI{
			Config: own.Generic.OpenAPIConfig, V3Config: own.Generic.OpenAPIV3Config,
		},
		policies: own.VersionedInformers.Admissionregistration().V1().MutatingAdmissionPolicies().Lister(),
		made:     mux.NewPathRecorderMux("openapi"),
		wanted:   make(chan struct{}),
		known:    make(chan struct{}),
	}
	d.second = sync.OnceFunc(func() { d.InstallV2(d.server.Handler.GoRestfulContainer, d.made) })
	d.third = sync.OnceFunc(func() {
		d.InstallV3(d.server.Handler.GoRestfulContainer, d.made)
		close(d.wanted)
	})
	d.tell = sync.OnceFunc(func() { close(d.known) })
	first := config.Aggregator.GenericConfig
	chained := first.BuildHandlerChainFunc
	first.BuildHandlerChainFunc = func(handler http.Handler, config *server.Config) http.Handler {
		return chained(d.await(handler), config)
	}
	return d
}

// await lets a question about version 3 wait until the first server knows the answer.
func (d *onDemand) await(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(answer http.ResponseWriter, question *http.Request) {
		if strings.HasPrefix(question.URL.Path, "/openapi/v3") && !d.idle(question) {
			d.third()
			select {
			case <-d.known:
			case <-question.Context().Done():
			}
		}
		handler.ServeHTTP(answer, question)
	})
}

// idle tells of a question that the server asks itself and whose answer it will not read.
func (d *onDemand) idle(question *http.Request) bool {
	who, found := request.UserFrom(question.Context())
	if !found || who.GetName() != user.APIServerUser {
		return false
	}
	policies, err := d.policies.List(labels.Everything())
	return err == nil && len(policies) == 0
}

func (d *onDemand) install(server *server.GenericAPIServer) {
	d.server = server
	paths := server.Handler.NonGoRestfulMux
	paths.Handle("/openapi/v2", http.HandlerFunc(d.whole))
	paths.Handle("/openapi/v3", http.HandlerFunc(d.groups))
	paths.HandlePrefix("/openapi/v3/", d.made)
}

// whole is version 2, which is gathered when a client asks, and not before.
func (d *onDemand) whole(answer http.ResponseWriter, question *http.Request) {
	d.second()
	d.made.ServeHTTP(answer, question)
}

// groups lists what version 3 describes: nothing before a client has asked.
func (d *onDemand) groups(answer http.ResponseWriter, question *http.Request) {
	select {
	case <-d.wanted:
		d.made.ServeHTTP(answer, question)
		d.tell()
	default:
		answer.Header().Set("Content-Type", "application/json")
		answer.Write([]byte(`{"paths":{}}`))
	}
}
