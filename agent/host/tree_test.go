package host

import (
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// plant makes a recorded machine below a temporary directory and returns its
// roots. A recording is one text file; each line is
//
//	path = text        a file with the text and a newline
//	path : hex         a file of bytes
//	path @ include     a file with the content of testdata/include
//	path -> target     a symbolic link
//	path/              an empty directory
//
// with paths below /, and # for comments.
func plant(t *testing.T, recording string) Roots {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", recording))
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	for i, line := range strings.Split(string(text), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if err := plantLine(root, line); err != nil {
			t.Fatalf("%s:%d: %v", recording, i+1, err)
		}
	}
	return Roots{
		Sys: filepath.Join(root, "sys"), Proc: filepath.Join(root, "proc"),
		Dev: filepath.Join(root, "dev"), Etc: filepath.Join(root, "etc"),
	}
}

func plantLine(root, line string) error {
	fields := strings.SplitN(line, " ", 3)
	path := filepath.Join(root, fields[0])
	if len(fields) == 1 {
		return os.MkdirAll(path, 0o755)
	}
	value := ""
	if len(fields) == 3 {
		value = fields[2]
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	content := []byte(strings.ReplaceAll(value, `\n`, "\n") + "\n")
	var err error
	switch fields[1] {
	case "->":
		return os.Symlink(value, path)
	case ":":
		content, err = hex.DecodeString(strings.ReplaceAll(value, " ", ""))
	case "@":
		content, err = os.ReadFile(filepath.Join("testdata", value))
	}
	if err != nil {
		return err
	}
	return os.WriteFile(path, content, 0o644)
}
