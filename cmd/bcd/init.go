package main

import (
	"fmt"
	"os"

	"github.com/better-compute/bcd/supervisor/pid1"
)

// rescueShell is u-root's, where the image has it.
const rescueShell = "/bbin/gosh"

// runInit is bcd with process id 1. It comes back only in a container whose
// pid 1 is a bcd command, where there is nothing to be the init of.
func runInit() {
	if len(os.Args) > 1 && os.Args[0] != "/init" && os.Getenv("container") != "" {
		return
	}
	options := pid1.Options{Banner: "bcd " + version, Args: []string{"supervise"}}
	if _, err := os.Stat(rescueShell); err == nil {
		options.RescueShell = rescueShell
	}
	if err := pid1.Main(options); err != nil {
		fmt.Fprintln(os.Stderr, "bcd:", err)
		os.Exit(1)
	}
}
