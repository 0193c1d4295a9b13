package main

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

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
			log := newLogger(cfg.LogLevel)
			c, err := controller.New(cfg, controller.Options{
				Version: version, Logger: log,
				ServiceManager: controller.ServiceManagerFrom(os.LookupEnv, os.Getpid()), Activation: true,
			})
			if err != nil {
				return err
			}
			hangUp := make(chan os.Signal, 1)
			signal.Notify(hangUp, syscall.SIGHUP)
			defer signal.Stop(hangUp)
			ctx, cancel := context.WithCancel(cmd.Context())
			defer cancel()
			go reloadAt(ctx, hangUp, log, func() error {
				next, err := configFrom(cmd, file, nil)
				if err != nil {
					return err
				}
				return c.Reload(next)
			})
			return c.Run(cmd.Context())
		},
	}
	addConfigFile(cmd.Flags(), &file)
	addConfigFlags(cmd.Flags())
	return cmd
}

// reloadAt reads the settings anew at each signal until ctx ends. Settings that
// are no good change nothing.
func reloadAt(ctx context.Context, signals <-chan os.Signal, log *slog.Logger, reload func() error) {
	for {
		select {
		case <-signals:
			if err := reload(); err != nil {
				log.Error("the settings were not reloaded and nothing has changed", "err", err)
			}
		case <-ctx.Done():
			return
		}
	}
}
