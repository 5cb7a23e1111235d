package logs

import (
	"bytes"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const procTCP = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:0CEA 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1
   1: 0F02000A:A0B4 0202000A:01BB 01 00000000:00000000 00:00000000 00000000     0        0 2 1
`
const procTCP6 = `  sl  local_address                         remote_address                        st
   0: 000080FE00000000FF005450FE9A1234:0016 00000000000000000000000000000000:0000 0A 0
`
const procUDP = `   sl  local_address rem_address   st
  12: 00000000:0044 00000000:0000 07 0
  13: 0F02000A:A0B4 0202000A:0035 01 0
`
const procPacket = `sk               RefCnt Type Proto  Iface R Rmem   User   Inode
0000000000000000 3      3    88cc   2     1 0      0      1234
`

func TestSocketsSource(t *testing.T) {
	proc := t.TempDir()
	dir := filepath.Join(t.TempDir(), "private")
	path := filepath.Join(dir, "a.sock")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(proc, "net"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"tcp": procTCP, "tcp6": procTCP6, "udp": procUDP, "packet": procPacket,
		"unix": "Num RefCount Protocol Flags Type St Inode Path\n" +
			"0: 00000002 00000000 00010000 0001 01 15 " + path + "\n" +
			"0: 00000003 00000000 00000000 0001 03 16\n" +
			"0: 00000002 00000000 00010000 0001 01 17 @abstract name\n",
	} {
		if err := os.WriteFile(filepath.Join(proc, "net", name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	if err := SocketsSource("sockets.txt", proc, path, filepath.Join(dir, "gone.sock")).Write(t.Context(), &out, time.Time{}); err != nil {
		t.Fatal(err)
	}
	want := `tcp 127.0.0.1:3306
tcp6 [fe80::5054:ff:3412:9afe]:22
udp 0.0.0.0:68
# no udp6 in this kernel
# no raw in this kernel
# no raw6 in this kernel
packet protocol 0x88cc interface 2
unix ` + path + ` mode 0600 in 0700
unix @abstract name
unix ` + path + ` mode 0600 in 0700
unix ` + dir + `/gone.sock
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}

// TestSocketsOfThisMachine finds a socket of this process in the real tables.
func TestSocketsOfThisMachine(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	var out bytes.Buffer
	if err := SocketsSource("sockets.txt", "/proc").Write(t.Context(), &out, time.Time{}); err != nil {
		t.Fatal(err)
	}
	if want := "tcp " + listener.Addr().String() + "\n"; !strings.Contains(out.String(), want) {
		t.Errorf("no %q in\n%s", want, out.String())
	}
}

func TestProcessesSource(t *testing.T) {
	proc := t.TempDir()
	for number, arguments := range map[string]string{"1": "/init\x00", "27": "/bin/bcd\x00supervise\x00", "2": "", "self": "x"} {
		if err := os.Mkdir(filepath.Join(proc, number), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(proc, number, "cmdline"), []byte(arguments), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	if err := ProcessesSource("processes.txt", proc).Write(t.Context(), &out, time.Time{}); err != nil {
		t.Fatal(err)
	}
	if want := "1 /init\n2 [kernel]\n27 /bin/bcd supervise\n"; out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}

func FuzzSockets(f *testing.F) {
	for _, text := range []string{procTCP, procTCP6, procUDP, procPacket, "h\n0: 2 0 00010000 1 1 15 /x\n"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for _, table := range socketTables {
			// Only a panic or a hang is wrong.
			_ = readSockets(strings.NewReader(text), table.line, io.Discard)
		}
	})
}
