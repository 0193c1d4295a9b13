package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"headgate/internal/controller"
)

// usageError marks an error of the command line or the configuration.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "headgate",
		Short:         "Runs tasks on a fleet of agents, safely, from one place",
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &usageError{err} })
	root.AddCommand(newUpCommand(), newServeCommand(), newMigrateCommand(), newStatusCommand(), newRetentionCommand(), newRaiseEpochCommand(), newVersionCommand())
	return root
}

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		Run: func(cmd *cobra.Command, _ []string) {
			fmt.Fprintln(cmd.OutOrStdout(), "headgate", version)
		},
	}
}

// addConfigFlags gives a command a flag for each setting of the controller, or
// for those that are named. Help shows them in that order, since some speak of
// the one before.
func addConfigFlags(flags *pflag.FlagSet, only ...string) {
	flags.SortFlags = false
	for _, k := range controller.Keys() {
		if len(only) > 0 && !slices.Contains(only, k.Name) {
			continue
		}
		flags.String(k.Name, k.Default(), fmt.Sprintf("%s [$%s]", k.Help, k.EnvName()))
		if k.Bool {
			flags.Lookup(k.Name).NoOptDefVal = "true"
		}
	}
}

func addConfigFile(flags *pflag.FlagSet, file *string) {
	flags.StringVar(file, "config", "", "configuration file (YAML)")
}

// configFrom loads the configuration from the file, the environment and the
// flags that were given; preset are values that win over defaults alone, for
// commands that read no file.
func configFrom(cmd *cobra.Command, file string, preset map[string]string) (controller.Config, error) {
	given := map[string]string{}
	cmd.Flags().Visit(func(f *pflag.Flag) { given[f.Name] = f.Value.String() })
	values := map[string]string{}
	for _, k := range controller.Keys() {
		if v, ok := preset[k.Name]; ok {
			if _, set := os.LookupEnv(k.EnvName()); !set {
				values[k.Name] = v
			}
		}
		if v, ok := given[k.Name]; ok {
			values[k.Name] = v
		}
	}
	cfg, err := controller.LoadConfig(controller.Sources{File: file, Environ: os.Environ(), Flags: values})
	if err != nil {
		return cfg, &usageError{fmt.Errorf("the configuration has problems:\n  %s", strings.ReplaceAll(err.Error(), "\n", "\n  "))}
	}
	return cfg, nil
}

// newLogger writes text lines to standard error: standard output is for data.
func newLogger(level string) *slog.Logger {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		l = slog.LevelInfo
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: l}))
}

// databaseURL gives the flag's value or that of the environment.
func databaseURL(flag string) (string, error) {
	if flag == "" {
		flag, _ = os.LookupEnv("HEADGATE_DATABASE_URL")
	}
	if flag == "" {
		return "", &usageError{errors.New("--database-url (or HEADGATE_DATABASE_URL) must name a PostgreSQL server")}
	}
	return flag, nil
}
