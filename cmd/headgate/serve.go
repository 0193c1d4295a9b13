package main

import (
	"os"

	"github.com/spf13/cobra"

	"headgate/internal/controller"
)

func newServeCommand() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the controller on a given PostgreSQL server",
		Long: "Run the controller. Settings come from flags, the environment (HEADGATE_...), the file\n" +
			"given by --config, and defaults, in this order of precedence.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := configFrom(cmd, file, nil)
			if err != nil {
				return err
			}
			tuneMemory(os.LookupEnv)
			c, err := controller.New(cfg, controller.Options{
				Version: version, Logger: newLogger(cfg.LogLevel),
				ServiceManager: controller.ServiceManagerFrom(os.LookupEnv, os.Getpid()), Activation: true,
			})
			if err != nil {
				return err
			}
			return c.Run(cmd.Context())
		},
	}
	cmd.Flags().StringVar(&file, "config", "", "configuration file (YAML)")
	addConfigFlags(cmd.Flags())
	return cmd
}
