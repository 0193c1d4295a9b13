package main

import (
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"headgate/internal/controller"
)

func newMigrateCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "Bring the database schema up to date, or show how it stands",
	}
	var dsn string
	cmd.PersistentFlags().StringVar(&dsn, "database-url", "", "PostgreSQL, as URL or keywords [$HEADGATE_DATABASE_URL]")
	cmd.AddCommand(&cobra.Command{
		Use:   "up",
		Short: "Apply every migration that is missing; safe while controllers run",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			url, err := databaseURL(dsn)
			if err != nil {
				return err
			}
			n, err := controller.MigrateUp(cmd.Context(), url)
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%d migrations applied; the schema is up to date\n", n)
			return nil
		},
	})
	cmd.AddCommand(&cobra.Command{
		Use:   "status",
		Short: "List the migrations and when they were applied",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			url, err := databaseURL(dsn)
			if err != nil {
				return err
			}
			rows, err := controller.MigrateStatus(cmd.Context(), url)
			if err != nil {
				return err
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "VERSION\tNAME\tAPPLIED")
			for _, r := range rows {
				applied := "not yet"
				if !r.AppliedAt.IsZero() {
					applied = r.AppliedAt.UTC().Format("2006-01-02 15:04:05 UTC")
				}
				fmt.Fprintf(w, "%d\t%s\t%s\n", r.Version, r.Name, applied)
			}
			return w.Flush()
		},
	})
	return cmd
}
