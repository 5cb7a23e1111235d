package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"path/filepath"

	"github.com/better-compute/bcd/agent"
	"github.com/better-compute/bcd/agent/builtin"
	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/dispatch"
	"github.com/better-compute/bcd/agent/durable"
	"github.com/better-compute/bcd/agent/host"
	"github.com/better-compute/bcd/agent/logs"
	"github.com/better-compute/bcd/agent/secret"
	"github.com/better-compute/bcd/deploy"
)

// allExecutors are the command kinds of this mode.
func (d *daemon) allExecutors(a *agent.Agent) ([]dispatch.Executor, error) {
	all := append(builtin.Executors(a), d.logsExecutor())
	if d.executors == nil {
		return all, nil
	}
	more, err := d.executors(d, a)
	return append(all, more...), err
}

func (d *daemon) logsExecutor() dispatch.Executor {
	return &logs.Executor{
		Dir: filepath.Join(d.place.DataDir, "logs"),
		Sources: []logs.Source{
			d.logs.ring.Source("bcd.log"),
			logs.JSONSource("status.json", func(ctx context.Context) (any, error) { return d.status(ctx), nil }),
			logs.JSONSource("doctor.json", d.doctor),
			logs.JSONSource("hardware.json", func(ctx context.Context) (any, error) { return host.Read(ctx, d.hardware) }),
			logs.SocketsSource("sockets.txt", "/proc", d.place.SocketPath),
			logs.ProcessesSource("processes.txt", "/proc"),
			logs.DmesgSource("dmesg.txt"),
			logs.JournalSource("journal-bcd.txt", "bcd.service", logs.SystemExec),
			logs.JournalSource("journal.txt", "", logs.SystemExec),
		},
		Redactor: d.logs.redactor,
		Uploader: &logs.BlobUploader{Client: d.client(true), GatewayURL: d.place.GatewayURL},
		Clock:    clock.System(),
	}
}

// deployExecutors is deploy.image, which only the ramdisk has.
func deployExecutors(d *daemon, a *agent.Agent) ([]dispatch.Executor, error) {
	external, err := imageClient(filepath.Join(d.place.TrustDir, imageRootsFile))
	if err != nil {
		return nil, err
	}
	x, err := deploy.NewExecutor(deploy.ExecutorOptions{
		MachineID: func() string { return d.current.Get().MachineID },
		Gateway: func() (string, *http.Client, error) {
			return d.place.GatewayURL, d.client(true), nil
		},
		External: external,
		Secrets:  agentSecrets{a},
		StateDir: filepath.Join(d.place.DataDir, "deploy"),
		Deps:     deploy.Deps{Log: d.logs.log},
	})
	if err != nil {
		return nil, err
	}
	return []dispatch.Executor{x}, nil
}

// imageRootsFile, in the trust folder, has the certificate authorities of image
// servers that are not the gateway.
const imageRootsFile = "image-roots.pem"

// imageClient reads images from https servers elsewhere. They are trusted with
// nothing, since each image has its digest in a signed command; still, who
// reads along learns what a machine gets. The ramdisk has no system roots.
func imageClient(rootsPath string) (*http.Client, error) {
	roots, err := x509.SystemCertPool()
	if err != nil {
		return nil, fmt.Errorf("certificate authorities of this system: %w", err)
	}
	more, err := durable.ReadFile(rootsPath, maxImageRoots)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, fmt.Errorf("certificate authorities of image servers: %w", err)
	case !roots.AppendCertsFromPEM(more):
		return nil, fmt.Errorf("%s holds no certificate", rootsPath)
	}
	return &http.Client{Transport: &http.Transport{
		Proxy:           http.ProxyFromEnvironment,
		TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
	}}, nil
}

// maxImageRoots has room for a whole system's list.
const maxImageRoots = 1 << 20

// agentSecrets fetches over the agent's session.
type agentSecrets struct{ agent *agent.Agent }

func (s agentSecrets) Fetch(ctx context.Context, reference, commandID string) (*secret.Value, error) {
	return s.agent.FetchSecret(ctx, commandID, reference)
}
