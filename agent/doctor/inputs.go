package doctor

import (
	"context"
	"crypto/tls"
	"errors"
	"io/fs"
	"net"
	"sync"
	"time"

	"github.com/better-compute/bcd/agent/host"
)

// Inputs is what the checks look at; [FromHost] fills in a part. A nil function leaves its check out, so
// that each mode asks only what it can answer. Functions must return when
// their context ends.
type Inputs struct {
	// Now is the wall clock; nil is time.Now.
	Now func() time.Time
	// ServerTime is the gateway's time as the session's mark has it; false
	// before the first mark. Validity and clock offset are judged by it.
	ServerTime func() (time.Time, bool)

	// Config reads the configuration. An error that is [fs.ErrNotExist] means
	// that there is no file.
	Config func(context.Context) (Config, error)
	// GPUs samples the GPUs; [host.SampleGPUs].
	GPUs func(context.Context) (host.GPUSample, error)
	// Hardware reads the inventory.
	Hardware func(context.Context) (Hardware, error)
	// KVM and IOMMUUnits are [host.KVM] and [host.IOMMUUnits].
	KVM        func() bool
	IOMMUUnits func() int
	// Dial opens a TCP connection; nil is net.Dialer. The gateway check runs
	// when Config gives a gateway.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// TLS, when set, is how the agent would speak to the gateway: the check
	// then also does the handshake. ServerName is set by the check if empty.
	TLS *tls.Config
	// Proxy is the HTTPS proxy that the environment names, without
	// credentials; empty is none.
	Proxy string
	// Identity loads the node's identity. [ErrNotJoined] means that there is
	// none; any other error that it does not load.
	Identity func(context.Context) (Identity, error)
	// Clock reads whether the host clock is synchronized.
	Clock func() (host.Clock, error)
	// TPM is the inventory's.
	TPM func(context.Context) (host.TPM, error)
	// Disk says how full the file system of the data directory is.
	Disk func() (Disk, error)
	// Journal reads the journal's state. [fs.ErrNotExist] means that there is
	// none yet.
	Journal func(context.Context) (Journal, error)
}

// ErrNotJoined is returned by [Inputs.Identity] on a machine that has not
// joined.
var ErrNotJoined = errors.New("not joined")

// Config is what the checks want of the configuration.
type Config struct {
	// Path is the file's path, or what else the configuration came from
	// (SMBIOS, kernel command line).
	Path    string
	Gateway string // URL
	Site    string
	// Mode is the file's mode; 0 when it is no file.
	Mode fs.FileMode
}

// Hardware is the inventory.
type Hardware struct {
	Sections []host.Section
	// PCIGPUs counts the NVIDIA GPUs on the PCI bus.
	PCIGPUs int
}

// Identity is the node's identity.
type Identity struct {
	NodeID, Site, Role  string
	NotBefore, NotAfter time.Time
}

// Disk is a file system. TotalBytes is 0 for one that has no size of its own
// (the ramdisk's root).
type Disk struct {
	Path       string
	FreeBytes  int64
	TotalBytes int64
}

// Journal is the journal's state.
type Journal struct {
	Path       string
	Bytes      int64
	LimitBytes int64
	// Commands whose outcome the gateway has not acknowledged, and events.
	Commands   int
	Events     int
	EventLimit int
	// Lost says that an earlier journal was damaged and moved aside, and
	// where to.
	Lost string
}

// now is the best time there is: the gateway's, else the host's.
func (in Inputs) now() time.Time {
	if in.ServerTime != nil {
		if t, ok := in.ServerTime(); ok {
			return t
		}
	}
	return in.wall()
}

func (in Inputs) wall() time.Time {
	if in.Now != nil {
		return in.Now()
	}
	return time.Now()
}

// once makes several checks share one reading.
func once[T any](read func(context.Context) (T, error)) func(context.Context) (T, error) {
	if read == nil {
		return nil
	}
	var o sync.Once
	var value T
	var err error
	return func(ctx context.Context) (T, error) {
		o.Do(func() { value, err = read(ctx) })
		return value, err
	}
}

// Checks returns the checks that the inputs allow, in the order in which they
// are printed.
func Checks(in Inputs) []Check {
	in.Config, in.GPUs, in.Hardware = once(in.Config), once(in.GPUs), once(in.Hardware)
	var list []Check
	add := func(possible bool, c Check) {
		if possible {
			list = append(list, c)
		}
	}
	dataDir := Need{"config", "data directory"}
	add(in.Config != nil, Check{ID: "config", Run: in.config})
	add(in.GPUs != nil, Check{ID: "nvml", Run: in.nvml})
	add(in.Hardware != nil, Check{ID: "hardware", Run: in.hardware})
	add(in.KVM != nil, Check{ID: "kvm", Run: in.kvm})
	add(in.IOMMUUnits != nil, Check{ID: "iommu", Run: in.iommu})
	add(in.Config != nil, Check{ID: "gateway", DependsOn: []Need{{"config", "gateway"}}, Run: in.gateway})
	add(in.Identity != nil, Check{ID: "identity", DependsOn: []Need{dataDir}, Run: in.identity})
	add(in.GPUs != nil, Check{ID: "gpu", DependsOn: []Need{{"nvml", "gpus"}}, Run: in.gpu})
	add(in.Clock != nil, Check{ID: "clock", Run: in.clock})
	add(in.TPM != nil, Check{ID: "tpm", Run: in.tpm})
	add(in.Disk != nil, Check{ID: "disk", DependsOn: []Need{dataDir}, Run: in.disk})
	add(in.Journal != nil, Check{ID: "journal", DependsOn: []Need{dataDir}, Run: in.journal})
	return list
}
