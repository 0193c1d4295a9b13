// Command headgate is the controller (serve), the one-command start (up) and
// the client commands. Each command lives in the file of its name.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"headgate/internal/fault"
)

// version is set by the linker.
var version = "dev"

// Exit codes of the program.
const (
	exitError = 1 // something went wrong
	exitUsage = 2 // the command line or the configuration is wrong

	exitSignal = 128 // plus the number of the second signal
)

func main() {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	err := newRootCommand().ExecuteContext(untilSignal(signals, os.Exit))
	if err == nil {
		return
	}
	fmt.Fprintln(os.Stderr, "headgate: "+describe(err))
	if isUsage(err) {
		os.Exit(exitUsage)
	}
	os.Exit(exitError)
}

// untilSignal gives a context that the first signal ends. The second one ends
// the program at once, whatever the end of the context has begun; children end
// with it, since they ask for a signal of their own when their parent dies.
func untilSignal(signals <-chan os.Signal, exit func(code int)) context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		<-signals
		cancel()
		code := exitSignal
		if n, ok := (<-signals).(syscall.Signal); ok {
			code += int(n)
		}
		exit(code)
	}()
	return ctx
}

// describe gives an error with what to do next, where that is known.
func describe(err error) string {
	if f, ok := errors.AsType[*fault.Error](err); ok && f.Hint != "" {
		return err.Error() + "\n" + f.Hint
	}
	return err.Error()
}

// isUsage says whether the command line was wrong. Cobra has no type for
// commands and arguments that it does not know, only this text.
func isUsage(err error) bool {
	_, ok := errors.AsType[*usageError](err)
	return ok || strings.HasPrefix(err.Error(), "unknown command ")
}
