// Command headgate is the controller (serve), the one-command start (up) and
// the client commands. Each command lives in the file of its name.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// version is set by the linker.
var version = "dev"

// Exit codes of the program; `headgate help` lists them.
const (
	exitError = 1 // something went wrong
	exitUsage = 2 // the command line or the configuration is wrong
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := newRootCommand().ExecuteContext(ctx)
	stop()
	if err == nil {
		return
	}
	fmt.Fprintln(os.Stderr, "headgate: "+err.Error())
	if _, ok := errors.AsType[*usageError](err); ok {
		os.Exit(exitUsage)
	}
	os.Exit(exitError)
}
