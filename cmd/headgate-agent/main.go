// Command headgate-agent runs beside the managed services and executes the
// tasks that a controller of its fleet gives it, as far as the policy file of
// this machine allows.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"headgate/internal/fault"
)

// version is set by the linker.
var version = "dev"

// Exit codes.
const (
	exitFailure = 1 // the agent cannot run or go on; the text says why
	exitUsage   = 2 // wrong flags or arguments
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

func run(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	explain(stderr, err)
	if errors.Is(err, errUsage) {
		return exitUsage
	}
	return exitFailure
}

// errUsage marks mistakes on the command line.
var errUsage = errors.New("see headgate-agent --help")

func usage(err error) error { return fmt.Errorf("%w (%w)", err, errUsage) }

// explain prints what went wrong and what to do about it.
func explain(w io.Writer, err error) {
	e, ok := errors.AsType[*fault.Error](err)
	if !ok {
		fmt.Fprintf(w, "headgate-agent: %v\n", err)
		return
	}
	fmt.Fprintf(w, "headgate-agent: %s [%s]\n", e.Message, e.Code)
	if e.Err != nil {
		fmt.Fprintf(w, "  cause: %v\n", e.Err)
	}
	if e.Hint != "" {
		fmt.Fprintf(w, "  %s\n", e.Hint)
	}
}

func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usage(fmt.Errorf("unexpected argument %q", args[0]))
	}
	return nil
}

func oneArg(what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != 1 {
			return usage(fmt.Errorf("name one %s", what))
		}
		return nil
	}
}

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: noArgs,
		Run: func(cmd *cobra.Command, _ []string) { fmt.Fprintln(cmd.OutOrStdout(), "headgate-agent", version) },
	}
}
