package debian

import (
	"strings"
	"testing"
	"testing/fstest"
)

const osRelease12 = "PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nID=debian\nVERSION_CODENAME=bookworm\n"

func machine(files map[string]string) fstest.MapFS {
	out := fstest.MapFS{"etc/os-release": {Data: []byte(osRelease12)}}
	for name, text := range files {
		out[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return out
}

func TestDerive(t *testing.T) {
	for name, tc := range map[string]struct {
		files map[string]string
		extra []string
		want  string
	}{
		"deb822": {
			files: map[string]string{"etc/apt/sources.list.d/debian.sources": `# made by the installer
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates bookworm-backports
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
`},
			extra: []string{"non-free-firmware"},
			want: `Types: deb
URIs: http://mirror.example/debian
Suites: trixie trixie-updates
Components: main non-free-firmware
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: trixie-security
Components: main non-free-firmware
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
`,
		},
		"one line, options, comments, a source package line": {
			files: map[string]string{"etc/apt/sources.list": `
# deb http://commented.example bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] https://private.example/debian bookworm main contrib # ours
deb-src https://private.example/debian bookworm main
deb [ trusted=yes ] http://local.example/debian stable main
`},
			want: `Types: deb
URIs: https://private.example/debian
Suites: trixie
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://local.example/debian
Suites: trixie
Components: main
Trusted: yes
`,
		},
		"third parties and disabled sources stay out": {
			files: map[string]string{
				"etc/apt/sources.list":                       "deb http://mirror.example/debian bookworm main non-free-firmware\n",
				"etc/apt/sources.list.d/runner.list":         "deb [signed-by=/usr/share/keyrings/runner.gpg] https://runner.example/debian bookworm main\n",
				"etc/apt/sources.list.d/engine.list":         "deb https://engine.example/linux bookworm stable\n",
				"etc/apt/sources.list.d/database.list":       "deb https://database.example bookworm-pgdg main\n",
				"etc/apt/sources.list.d/old.list.disabled":   "deb https://gone.example bookworm main\n",
				"etc/apt/sources.list.d/off.sources":         "Enabled: no\nTypes: deb\nURIs: http://off.example\nSuites: bookworm\nComponents: main\n",
				"etc/apt/sources.list.d/flat.list":           "deb http://flat.example ./\n",
				"etc/apt/sources.list.d/unterminated.list":   "deb [arch=amd64 http://broken.example bookworm main\n",
				"etc/apt/sources.list.d/sourcesonly.sources": "Types: deb-src\nURIs: http://src.example\nSuites: bookworm\nComponents: main\n",
			},
			extra: []string{"non-free-firmware"},
			want:  "Types: deb\nURIs: http://mirror.example/debian\nSuites: trixie\nComponents: main non-free-firmware\n",
		},
		"the key file of one release": {
			files: map[string]string{
				"etc/apt/sources.list":                                "deb [signed-by=/usr/share/keyrings/debian-archive-bookworm-stable.gpg] http://mirror.example/debian bookworm main\n",
				"usr/share/keyrings/debian-archive-trixie-stable.gpg": "key",
			},
			want: "Types: deb\nURIs: http://mirror.example/debian\nSuites: trixie\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-trixie-stable.gpg\n",
		},
		"a key inside the stanza": {
			files: map[string]string{"etc/apt/sources.list.d/x.sources": "Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm\nComponents: main\nSigned-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQ\n -----END PGP PUBLIC KEY BLOCK-----\n"},
			want:  "Types: deb\nURIs: http://mirror.example/debian\nSuites: trixie\nComponents: main\nSigned-By: \n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQ\n -----END PGP PUBLIC KEY BLOCK-----\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := DeriveFrom(machine(tc.files), "trixie", tc.extra...)
			if err != nil {
				t.Fatal(err)
			}
			if string(got) != tc.want {
				t.Errorf("got\n%s\nwant\n%s", got, tc.want)
			}
			// What was derived reads back as sources of the wanted release.
			for _, s := range parseStanzas(string(got)) {
				for _, suite := range s.suites {
					if !strings.HasPrefix(suite, "trixie") {
						t.Errorf("suite %q", suite)
					}
				}
			}
		})
	}
}

func TestDeriveOnDebian13IsItself(t *testing.T) {
	m := machine(map[string]string{"etc/apt/sources.list": "deb http://mirror.example/debian trixie main\n"})
	m["etc/os-release"].Data = []byte("ID=debian\nVERSION_CODENAME=trixie\n")
	got, err := DeriveFrom(m, "trixie")
	if err != nil || !strings.Contains(string(got), "Suites: trixie\n") {
		t.Errorf("%s, %v", got, err)
	}
}

func TestDeriveSaysWhatIsWrong(t *testing.T) {
	for want, m := range map[string]fstest.MapFS{
		"images are built on Debian":          {"etc/os-release": {Data: []byte("ID=fedora\n")}},
		"find this machine's release":         {},
		"no apt source of this machine":       machine(nil),
		"more than any honest file":           machine(map[string]string{"etc/apt/sources.list": strings.Repeat("#", maxSourcesFile+1)}),
		"is not the name of a Debian release": nil,
	} {
		release := "trixie"
		if m == nil {
			m, release = machine(nil), "../x"
		}
		if _, err := DeriveFrom(m, release); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}

func FuzzSources(f *testing.F) {
	f.Add("deb [arch=amd64] http://x bookworm main\n", "Types: deb\nURIs: http://x\nSuites: bookworm\nComponents: main\nSigned-By:\n a\n b\n")
	f.Add("deb [", "\n \n:")
	f.Fuzz(func(t *testing.T, lines, text string) {
		out, err := DeriveFrom(machine(map[string]string{"etc/apt/sources.list": lines, "etc/apt/sources.list.d/x.sources": text}), "trixie")
		if err == nil && len(parseStanzas(string(out))) == 0 {
			t.Errorf("derived sources have no stanza: %q", out)
		}
		_, _ = parseIndex(text)
	})
}
