package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"headgate/internal/controller"
)

func newRaiseEpochCommand() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "raise-epoch",
		Short: "Go on with a database that was restored from a backup",
		Long: "Go on with a database that was restored from a backup. The agents have obeyed newer owners than it knows of, and\n" +
			"refuse it; this raises the epochs of all shards above everything that agents can know, and leaves out the ids of\n" +
			"tasks that were given after the backup. What ran since does not run again: the agents remember it.\n\n" +
			"Run it after every restore, best before controllers are started, and only when no controller runs on a newer\n" +
			"copy: it would lose its agents. The settings are those of `headgate serve`: flags, the environment, the file given\n" +
			"by --config. Without a database URL it is that of the `headgate up` whose directory is --data.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := retentionConfig(cmd, file)
			if err != nil {
				return err
			}
			epoch, err := controller.RaiseEpochs(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "All epochs are %d now. Controllers that run take their agents again within seconds.\n", epoch)
			return nil
		},
	}
	addConfigFile(cmd.Flags(), &file)
	addConfigFlags(cmd.Flags(), "data", "database-url", "database-direct-url")
	return cmd
}
