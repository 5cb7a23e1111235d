package pid1

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/better-compute/bcd/supervisor"
)

// These tests run process 1 as process 1, of a pid namespace, with real
// children: the test binary starts itself in the roles below. They need root.

const roleVariable = "BCD_PID1_TEST_ROLE"

func TestMain(m *testing.M) {
	switch role := os.Getenv(roleVariable); role {
	case "":
		os.Exit(m.Run())
	case "init":
		testInit()
	default:
		testSupervise(role)
	}
}

// testInit is Main without what would touch the machine that runs the tests.
func testInit() {
	p := newProcess(Options{
		Args: []string{"-test.run=^$"},
		Env:  []string{roleVariable + "=" + os.Getenv("BCD_PID1_TEST_STORY"), "BCD_PID1_TEST_DIR=" + os.Getenv("BCD_PID1_TEST_DIR")},
	})
	p.keeper.backoff = supervisor.Backoff{Initial: time.Millisecond, Max: time.Millisecond}
	p.ownsMounts, p.cgroup = false, ""
	p.stopWithin = 2 * time.Second
	p.openDog = func() (feeder, error) { return nil, os.ErrNotExist }
	p.reboot = func(a Action) error {
		left := p.reaper.reap()
		p.con.printf("RESULT action=%s orphans=%d left=%v", a, p.reaper.reaped(), left)
		p.con.flush(5 * time.Second)
		os.Exit(0)
		return nil
	}
	p.signals()
	p.con.add(firstConsole, "", os.Stderr)
	p.serve(context.Background())
}

// testSupervise is the supervisor process of a story.
func testSupervise(story string) {
	c, err := Connect()
	if err != nil {
		fmt.Println("connect:", err)
		os.Exit(1)
	}
	if _, err := Connect(); !errors.Is(err, ErrNoInit) {
		fmt.Println("second connect:", err)
	}
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGTERM)
	must(c.Heartbeat())
	switch story {
	case "deaths":
		switch generation() {
		case 1:
			panic("in a service's goroutine")
		case 2:
			// Something it started must not go on beside its successor's.
			must(exec.Command("sleep", "1000").Start())
			must(syscall.Kill(os.Getpid(), syscall.SIGKILL))
			select {}
		case 3:
			os.Exit(0) // nobody asked it to
		default:
			fmt.Println("alive again")
			must(c.Reboot("story told"))
		}
	case "children":
		good := runChildren()
		fmt.Printf("%d of 40 commands gave their own status\n", good)
		must(c.PowerOff("children done"))
	case "deaf":
		// Neither this process nor its child ends by SIGTERM.
		signal.Ignore(syscall.SIGTERM)
		must(exec.Command("sh", "-c", "trap '' TERM; while :; do sleep 1; done").Start())
		must(c.Kexec("deaf"))
		select {}
	}
	<-asked
	fmt.Println("stopped in order")
}

func must(err error) {
	if err != nil {
		fmt.Println("unexpected:", err)
		os.Exit(3)
	}
}

// generation counts the starts of a story in a file.
func generation() int {
	path := os.Getenv("BCD_PID1_TEST_DIR") + "/starts"
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	must(err)
	_, err = f.WriteString("x")
	must(err)
	fi, err := f.Stat()
	must(err)
	must(f.Close())
	return int(fi.Size())
}

// runChildren runs 40 commands with a status each, while as many orphans are
// made for process 1.
func runChildren() (good int) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			// The inner shell goes on after the outer one has ended.
			must(exec.Command("sh", "-c", "(sleep 0.05; exit 7) >/dev/null 2>&1 &").Run())
		})
		wg.Go(func() {
			err := exec.Command("sh", "-c", fmt.Sprintf("sleep 0.0%d; exit %d", i%10, 10+i)).Run()
			var e *exec.ExitError
			if errors.As(err, &e) && e.ExitCode() == 10+i {
				mu.Lock()
				good++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return good
}

// runStory runs process 1 with a story and returns what was on its console.
func runStory(t *testing.T, story string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "-test.run=^$")
	cmd.Env = append(os.Environ(), roleVariable+"=init", "BCD_PID1_TEST_STORY="+story, "BCD_PID1_TEST_DIR="+t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID, Setsid: true}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("process 1: %v\n%s", err, out)
	}
	return string(out)
}

func wantInOrder(t *testing.T, text string, parts ...string) {
	t.Helper()
	rest := text
	for _, p := range parts {
		_, after, ok := strings.Cut(rest, p)
		if !ok {
			t.Fatalf("lacks %q (in this order: %q):\n%s", p, parts, text)
		}
		rest = after
	}
}

func TestTheSupervisorMayDieAndTheMachineLives(t *testing.T) {
	out := runStory(t, "deaths")
	wantInOrder(t, out, "panic: in a service's goroutine", "namespace_test.go", "exit status 2",
		"killed by SIGKILL", "exit status 0", "restarting the machine: story told", "RESULT action=reboot", "left=false")
	wantInOrder(t, out, "alive again", "stopped in order", "RESULT") // by another pipe, so not in order with the above
	// sleep 1000 was killed with its parent's group, and reaped.
	wantInOrder(t, out, "orphans=1 ")
}

// u-root#746: a reaper that takes everything made os/exec fail 9 to 22 times of
// 40; without one, 40 of 40 orphans stayed zombies.
func TestOneOwnerOfWait(t *testing.T) {
	out := runStory(t, "children")
	wantInOrder(t, out, "40 of 40 commands gave their own status", "RESULT")
	wantInOrder(t, out, "switching the machine off: children done",
		"RESULT action=poweroff orphans=", "left=false")
	var orphans int
	_, after, _ := strings.Cut(out, "orphans=")
	if _, err := fmt.Sscanf(after, "%d", &orphans); err != nil || orphans < 40 {
		t.Errorf("%d orphans reaped, want 40 or more (a shell may add its sleep)", orphans)
	}
}

func TestProcessesThatIgnoreSIGTERMAreKilled(t *testing.T) {
	out := runStory(t, "deaf")
	wantInOrder(t, out, "starting the loaded kernel: deaf", "it did not end", "stop processes: some processes are still there",
		"RESULT action=kexec", "left=false")
}

func TestMainRefusesToBeAnotherProcess(t *testing.T) {
	if err := Main(Options{}); !errors.Is(err, ErrNotInit) {
		t.Errorf("error %v", err)
	}
}
