// Command trivial is the smallest init: it says on the console that it runs,
// and turns the machine off. Boot times are measured against it, and image
// tests use it where it does not matter what the image runs.
package main

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// version is set by the build.
var version = "unknown"

func main() {
	fmt.Printf("trivial init %s is pid %d\n", version, os.Getpid())
	if os.Getpid() != 1 {
		return
	}
	unix.Sync()
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		fmt.Println("trivial init: power off:", err)
	}
	select {} // pid 1 must not return: the kernel would panic
}
