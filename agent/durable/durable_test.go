package durable

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

func TestWriteFileIsWholeAtEveryCrash(t *testing.T) {
	boom := errors.New("power cut")
	for _, step := range []string{StepCreate, StepWrite, StepSync, StepRename, StepSyncDir} {
		t.Run(step, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "file")
			if err := WriteFile(path, []byte("old"), 0o600); err != nil {
				t.Fatal(err)
			}
			w := Writer{Before: func(s, name string) error {
				if s == step {
					return boom
				}
				return nil
			}}
			if err := w.WriteFile(path, []byte("new"), 0o600); !errors.Is(err, boom) {
				t.Fatalf("error %v, want the crash", err)
			}
			want := "old"
			if step == StepSyncDir {
				want = "new"
			}
			if got, err := os.ReadFile(path); err != nil || string(got) != want {
				t.Errorf("after a crash before %s: %q, %v; want %q", step, got, err, want)
			}
			if err := WriteFile(path, []byte("newer"), 0o600); err != nil {
				t.Fatalf("the leftover of a crash stops the next write: %v", err)
			}
			entries, err := os.ReadDir(filepath.Dir(path))
			if err != nil || len(entries) != 1 {
				t.Errorf("leftovers: %v, %v", entries, err)
			}
		})
	}
}

func TestWriteFileMode(t *testing.T) {
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	path := filepath.Join(t.TempDir(), "file")
	if err := WriteFile(path, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o644 {
		t.Errorf("mode %v, %v; want 0644 whatever the umask", info.Mode(), err)
	}
}

func TestWriteFileReplacesAPlantedLink(t *testing.T) {
	dir := t.TempDir()
	victim := filepath.Join(dir, "victim")
	if err := os.WriteFile(victim, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "file")
	for _, link := range []string{path, TempName(path)} {
		if err := os.Symlink(victim, link); err != nil {
			t.Fatal(err)
		}
	}
	if err := WriteFile(path, []byte("new"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(victim); string(got) != "mine" {
		t.Errorf("a link was followed: victim holds %q", got)
	}
	if info, err := os.Lstat(path); err != nil || !info.Mode().IsRegular() {
		t.Errorf("%v, %v", info, err)
	}
}

func TestShredAndRemove(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "token")
	if err := WriteFile(path, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	// A second name shows what the blocks hold after the first one is gone.
	other := filepath.Join(dir, "other")
	if err := os.Link(path, other); err != nil {
		t.Fatal(err)
	}
	if err := Shred(path); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("still there: %v", err)
	}
	if got, _ := os.ReadFile(other); string(got) != "\x00\x00\x00\x00\x00\x00" {
		t.Errorf("not overwritten: %q", got)
	}
	for name, f := range map[string]func(string) error{"shred": Shred, "remove": Remove} {
		if err := f(path); err != nil {
			t.Errorf("%s of nothing: %v", name, err)
		}
		if err := f(filepath.Join(dir, "no", "folder")); err != nil {
			t.Errorf("%s in no folder: %v", name, err)
		}
	}
}

func TestReadFileBounds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := WriteFile(path, []byte("12345"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadFile(path, 5); err != nil || string(got) != "12345" {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := ReadFile(path, 4); !errors.Is(err, ErrTooLarge) {
		t.Errorf("error %v, want ErrTooLarge", err)
	}
	if _, err := ReadFile(filepath.Dir(path), 4); err == nil {
		t.Error("a folder was read as a file")
	}
}
