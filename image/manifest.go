package image

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/better-compute/bcd/image/debian"
	"github.com/better-compute/bcd/image/gobuild"
)

const manifestFormat = "bcd-image-manifest 1"

// Manifest says what an image was made of: each input with its SHA-256. It is
// also a lock file: its packages can be demanded of a later build.
type Manifest struct {
	Format          string               `json:"format"`
	Profile         string               `json:"profile"`
	Architecture    string               `json:"architecture"`
	Version         string               `json:"version"`
	BuildTime       string               `json:"build_time"`
	SourceDateEpoch int64                `json:"source_date_epoch"`
	Gateway         string               `json:"gateway"`
	Cmdline         string               `json:"cmdline"`
	DebianRelease   string               `json:"debian_release"`
	KernelRelease   string               `json:"kernel_release"`
	Go              string               `json:"go"`
	MinMemMiB       int                  `json:"min_mem_mib"`
	Packages        []debian.Package     `json:"packages"`
	Inputs          []Input              `json:"inputs"`
	Firmware        []FirmwareFile       `json:"firmware"`
	Modules         []string             `json:"modules"`
	BCDModules      []gobuild.Dependency `json:"bcd_modules"`
	RescueModules   []gobuild.Dependency `json:"rescue_modules"`
	Outputs         []Input              `json:"outputs"`
}

// Input is a file that went in or came out.
type Input struct {
	Kind   string `json:"kind,omitempty"`
	Name   string `json:"name"`
	SHA256 string `json:"sha256"`
	Size   int64  `json:"size"`
}

func newInput(kind, name string, data []byte) Input {
	sum := sha256.Sum256(data)
	return Input{kind, name, hex.EncodeToString(sum[:]), int64(len(data))}
}

func (m *Manifest) addInput(kind, name string, data []byte) {
	m.Inputs = append(m.Inputs, newInput(kind, name, data))
}

func (m *Manifest) addOutput(name string, data []byte) {
	m.Outputs = append(m.Outputs, newInput("", name, data))
}

// The part of CycloneDX 1.6 (ECMA-424) that a bill of materials here uses.
type bom struct {
	Format       string      `json:"bomFormat"`
	SpecVersion  string      `json:"specVersion"`
	SerialNumber string      `json:"serialNumber"`
	Version      int         `json:"version"`
	Metadata     bomMetadata `json:"metadata"`
	Components   []component `json:"components"`
}

type bomMetadata struct {
	Timestamp string    `json:"timestamp"`
	Component component `json:"component"`
}

type component struct {
	Type    string `json:"type"`
	Ref     string `json:"bom-ref,omitempty"`
	Name    string `json:"name"`
	Version string `json:"version,omitempty"`
	PURL    string `json:"purl,omitempty"`
	Hashes  []hash `json:"hashes,omitempty"`
}

type hash struct {
	Algorithm string `json:"alg"`
	Content   string `json:"content"`
}

// sbom is the bill of materials in CycloneDX 1.6: Debian packages, Go modules
// of each program with the Go toolchain, firmware files.
func (m *Manifest) sbom() ([]byte, error) {
	var list []component
	seen := map[string]bool{}
	add := func(c component) {
		if !seen[c.Ref] {
			seen[c.Ref] = true
			list = append(list, c)
		}
	}
	for _, p := range m.Packages {
		purl := fmt.Sprintf("pkg:deb/debian/%s@%s?arch=%s&distro=%s", escape(p.Name), escape(p.Version), p.Architecture, m.DebianRelease)
		add(component{Type: "operating-system", Ref: purl, Name: p.Name, Version: p.Version, PURL: purl, Hashes: []hash{{"SHA-256", p.SHA256}}})
	}
	for _, modules := range [][]gobuild.Dependency{m.BCDModules, m.RescueModules} {
		for _, d := range modules {
			version := d.Version
			if d.Path == gobuild.Module {
				version = m.Version
			}
			purl := "pkg:golang/" + d.Path + "@" + escape(version)
			add(component{Type: "library", Ref: purl, Name: d.Path, Version: version, PURL: purl})
		}
	}
	goVersion := strings.TrimPrefix(m.Go, "go")
	add(component{Type: "library", Ref: "pkg:golang/std@" + escape(goVersion), Name: "std", Version: goVersion, PURL: "pkg:golang/std@" + escape(goVersion)})
	for _, in := range m.Inputs {
		if in.Kind != "trust" {
			add(component{Type: "application", Ref: "file:" + in.Name, Name: in.Name, Version: m.Version, Hashes: []hash{{"SHA-256", in.SHA256}}})
		}
	}
	for _, f := range m.Firmware {
		if f.Link == "" {
			add(component{Type: "firmware", Ref: "firmware:" + f.Path, Name: f.Path, Hashes: []hash{{"SHA-256", f.SHA256}}})
		}
	}
	name := "bcd-" + m.Profile + "-" + m.Architecture
	// The serial number is a UUID version 8 (RFC 9562, section 5.8) of the
	// contents: the same image has the same bill.
	id, err := json.Marshal(struct {
		Name, Version string
		Outputs       []Input
	}{name, m.Version, m.Outputs})
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(id)
	u := sum[:16]
	u[6], u[8] = u[6]&0x0f|0x80, u[8]&0x3f|0x80
	text, err := json.MarshalIndent(bom{
		Format: "CycloneDX", SpecVersion: "1.6", Version: 1,
		SerialNumber: fmt.Sprintf("urn:uuid:%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:]),
		Metadata:     bomMetadata{m.BuildTime, component{Type: "operating-system", Name: name, Version: m.Version}},
		Components:   list,
	}, "", "  ")
	if err != nil {
		return nil, err
	}
	return append(text, '\n'), nil
}

// escape is percent-encoding as package URLs want it for names and versions.
func escape(s string) string {
	return strings.NewReplacer("%", "%25", "+", "%2B", ":", "%3A", "~", "~", " ", "%20").Replace(s)
}
