package pid1

import (
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
)

// rescueWanted looks for the word bcd.rescue on the kernel command line.
func rescueWanted(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, 64<<10))
	return err == nil && slices.Contains(strings.Fields(string(data)), "bcd.rescue")
}

// rescue keeps a shell running on the console.
func (p *process) rescue() {
	for {
		p.con.printf("rescue shell %s on the console", p.opts.RescueShell)
		status, err := p.startShell()
		if err != nil {
			p.con.printf("rescue shell: %v", err)
			return
		}
		p.con.printf("rescue shell ended: %s", howEnded(<-status))
		time.Sleep(time.Second)
	}
}

func (p *process) startShell() (<-chan syscall.WaitStatus, error) {
	// The shell must lead a session to get the terminal as its own.
	tty, err := os.OpenFile("/dev/console", os.O_RDWR|noCTTY, 0)
	if err != nil {
		return nil, err
	}
	defer tty.Close()
	fd := tty.Fd()
	attr := &syscall.ProcAttr{
		Dir:   "/",
		Env:   environment,
		Files: []uintptr{fd, fd, fd},
		Sys:   &syscall.SysProcAttr{Setsid: true, Setctty: true, Ctty: 0},
	}
	_, status, err := p.reaper.start(func() (int, error) {
		return syscall.ForkExec(p.opts.RescueShell, []string{p.opts.RescueShell}, attr)
	})
	return status, err
}
