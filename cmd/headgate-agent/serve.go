package main

import (
	"fmt"
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"headgate/internal/agent"
)

// envPrefix is put before a flag's name: --enrol-token-file is also
// HEADGATE_AGENT_ENROL_TOKEN_FILE. A flag wins.
const envPrefix = "HEADGATE_AGENT_"

func newRoot() *cobra.Command {
	c := agent.Config{OwnProcess: true}
	root := &cobra.Command{
		Use:   "headgate-agent",
		Short: "Execute tasks for the controllers of a Headgate fleet",
		Long: "headgate-agent waits for a controller of its fleet and executes one task at a time, as far as the policy\n" +
			"file allows. An agent that belongs to no fleet yet is started with --enrol-token-file and waits to be paired.\n" +
			"Each flag can also be given by the environment: " + envPrefix + "DATA for --data, and so on.",
		Args:          noArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c.Version = version
			c.Logger = slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
			return agent.Run(cmd.Context(), c)
		},
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error { return fromEnvironment(cmd) },
	}
	f := root.Flags()
	dataFlag(f, &c.DataDir)
	f.StringVar(&c.Listen, "listen", agent.DefaultListen, "address to listen on; port 0 takes any free one")
	f.StringVar(&c.Name, "name", "", "name to ask for when paired (default: the host's name)")
	f.StringVar(&c.PolicyFile, "policy", "", "policy file: what this machine allows (default: core kinds, no programs)")
	f.Int64Var(&c.Limits.OutputSpool, "output-spool", agent.DefaultOutputSpool, "bytes of one task's output that are kept, half from its beginning and half from its end")
	f.StringVar(&c.EnrolTokenFile, "enrol-token-file", "", "file with an enrolment token; opens pairing for ten minutes")
	f.DurationVar(&c.Demo.Delay, "demo-delay", 0, "make each task slower, for demonstrations")
	f.Float64Var(&c.Demo.Flaky, "demo-flaky", 0, "make this part of the tasks fail, for demonstrations")
	for _, name := range []string{"demo-delay", "demo-flaky"} {
		_ = f.MarkHidden(name) // fails only for a flag that does not exist
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usage(err) })
	root.AddCommand(newVersion(), newPolicy(), newLedger(), newAppendID())
	return root
}

// dataFlag is --data, which several commands take.
func dataFlag(f *pflag.FlagSet, dir *string) {
	f.StringVar(dir, "data", "/var/lib/headgate-agent", "directory of the agent's identity and ledger")
}

// fromEnvironment fills in flags that the command line did not give.
func fromEnvironment(cmd *cobra.Command) error {
	var first error
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		name := envPrefix + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
		value, ok := os.LookupEnv(name)
		if !ok || f.Changed || f.Name == "help" {
			return
		}
		if err := cmd.Flags().Set(f.Name, value); err != nil && first == nil {
			first = usage(fmt.Errorf("%s: %w", name, err))
		}
	})
	return first
}
