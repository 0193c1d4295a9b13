package main

import (
	"fmt"
	"os"
	"path/filepath"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"headgate/internal/controller"
)

func newRetentionCommand() *cobra.Command {
	var file string
	var now bool
	cmd := &cobra.Command{
		Use:   "retention",
		Short: "Show which old tasks the controller would remove, and why; --now removes them",
		Long: "Show which old tasks the controller would remove, and why; --now removes them. The settings are those of\n" +
			"`headgate serve`: flags, the environment, the file given by --config. Without a database URL it is that of\n" +
			"the `headgate up` whose directory is --data.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := retentionConfig(cmd, file)
			if err != nil {
				return err
			}
			if now {
				return removeOldTasks(cmd, cfg)
			}
			return printRetention(cmd, cfg)
		},
	}
	addConfigFile(cmd.Flags(), &file)
	cmd.Flags().BoolVar(&now, "now", false, "remove what can be removed now")
	addConfigFlags(cmd.Flags(), "data", "database-url", "retention-age", "retention-tasks", "retention-bytes")
	return cmd
}

// retentionConfig gives the settings. Without a file those of the ports do not
// matter, so they get values that are never wrong.
func retentionConfig(cmd *cobra.Command, file string) (controller.Config, error) {
	if file != "" {
		return configFrom(cmd, file, nil)
	}
	preset := map[string]string{"public-addr": "127.0.0.1:0", "controller-addr": "127.0.0.1:0"}
	if _, inEnv := os.LookupEnv("HEADGATE_DATABASE_URL"); !inEnv && !cmd.Flags().Changed("database-url") {
		dir, err := filepath.Abs(cmd.Flag("data").Value.String())
		if err != nil {
			return controller.Config{}, err
		}
		r, err := readRunFile(dir)
		if err != nil {
			return controller.Config{}, &usageError{fmt.Errorf("name the database by --config, --database-url or, for a running `headgate up`, its directory by --data: %w", err)}
		}
		preset["database-url"] = r.DatabaseURL
	}
	return configFrom(cmd, "", preset)
}

func printRetention(cmd *cobra.Command, cfg controller.Config) error {
	parts, err := controller.PlanRetention(cmd.Context(), cfg)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "TASKS FROM\tTO\tABOUT\tOPEN\tSIZE\tSUBMITTED\tWOULD\tBECAUSE")
	for _, p := range parts {
		submitted, would := "-", "stay"
		if !p.Oldest.IsZero() {
			submitted = p.Oldest.UTC().Format(time.DateOnly) + " to " + p.Newest.UTC().Format(time.DateOnly)
		}
		if p.Drop {
			would = "go"
		}
		fmt.Fprintf(w, "%d\t%d\t%d\t%d\t%.1f MiB\t%s\t%s\t%s\n", p.FirstID, p.LastID, p.Tasks, p.Open, float64(p.Bytes)/(1<<20), submitted, would, p.Why)
	}
	return w.Flush()
}

func removeOldTasks(cmd *cobra.Command, cfg controller.Config) error {
	report, err := controller.ApplyRetention(cmd.Context(), cfg)
	out := cmd.OutOrStdout()
	for _, p := range report.Dropped {
		fmt.Fprintf(out, "removed tasks %d to %d (about %d, %.1f MiB): %s\n", p.FirstID, p.LastID, p.Tasks, float64(p.Bytes)/(1<<20), p.Why)
	}
	if report.Closed {
		fmt.Fprintln(out, "the next tasks go into a new partition, so that those of before can be removed in time")
	}
	if err == nil && len(report.Dropped) == 0 {
		fmt.Fprintln(out, "nothing to remove; `headgate retention` says why")
	}
	return err
}
