package identity

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
)

// scrubStack zeroes name's value in the environment block that the kernel put
// on the stack at exec. Its place is in /proc/self/stat, field 50 (proc(5),
// env_start). Without /proc nobody can read the block either.
func scrubStack(name string) error {
	environ, err := os.ReadFile("/proc/self/environ")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer clear(environ)
	offset, length := findVariable(environ, name)
	if length == 0 {
		return nil
	}
	stat, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return err
	}
	start, err := envStart(stat)
	if err != nil {
		return err
	}
	memory, err := os.OpenFile("/proc/self/mem", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = memory.WriteAt(make([]byte, length), start+int64(offset))
	if closeErr := memory.Close(); err == nil {
		err = closeErr
	}
	return err
}

// findVariable gives the place of name's value in a block of NUL-separated
// assignments.
func findVariable(environ []byte, name string) (offset, length int) {
	prefix := []byte(name + "=")
	for at := 0; at < len(environ); {
		end := bytes.IndexByte(environ[at:], 0)
		if end < 0 {
			end = len(environ) - at
		}
		if bytes.HasPrefix(environ[at:at+end], prefix) {
			return at + len(prefix), end - len(prefix)
		}
		at += end + 1
	}
	return 0, 0
}

// envStart reads field 50 of /proc/<pid>/stat. The name in field 2 may hold
// spaces and parentheses; what counts begins after the last one.
func envStart(stat []byte) (int64, error) {
	at := bytes.LastIndexByte(stat, ')')
	fields := bytes.Fields(stat[at+1:])
	const index = 50 - 3 // the first field after the name is number 3
	if len(fields) <= index {
		return 0, fmt.Errorf("/proc/self/stat has %d fields, want 50 or more", len(fields)+2)
	}
	return strconv.ParseInt(string(fields[index]), 10, 64)
}
