package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"headgate/internal/localpg"
)

// startDatabase starts the private cluster, unless the user named a server.
func (u *up) startDatabase(ctx context.Context) error {
	if u.cfg.DatabaseURL != privateCluster {
		return nil
	}
	if err := os.MkdirAll(u.opts.dir, 0o755); err != nil {
		return err
	}
	if err := u.findPostgres(ctx); err != nil {
		return err
	}
	cluster, err := u.startCluster(ctx)
	if err != nil {
		return err
	}
	u.cfg.DatabaseURL = cluster.DSN()
	runCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	go func() {
		defer close(done)
		u.keepCluster(runCtx, cluster)
	}()
	u.onStop(func(context.Context) error {
		cancel()
		<-done
		return nil
	})
	return nil
}

// findPostgres makes sure that server binaries are there: found, or installed
// when we are root on a system that we know how to do it on.
func (u *up) findPostgres(ctx context.Context) error {
	_, err := localpg.FindBinaries(u.clusterDir())
	if _, missing := errors.AsType[*localpg.NotFoundError](err); !missing {
		return err
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("%w\nRun this once, then again: %s", err, localpg.InstallHint())
	}
	fmt.Fprintln(os.Stderr, "PostgreSQL is not installed; installing the system's package")
	return localpg.InstallPackage(ctx, os.Stderr)
}

func (u *up) clusterDir() string { return filepath.Join(u.opts.dir, "postgres") }

func (u *up) startCluster(ctx context.Context) (*localpg.Cluster, error) {
	return localpg.Start(ctx, localpg.Config{Dir: u.clusterDir(), Logger: u.log})
}

// keepCluster starts the cluster again when its server is killed, and stops it
// at the end.
func (u *up) keepCluster(ctx context.Context, cluster *localpg.Cluster) {
	for {
		select {
		case <-ctx.Done():
			stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), clusterStop)
			defer cancel()
			if err := cluster.Stop(stop); err != nil {
				u.log.Error("stop the database", "err", err)
			}
			return
		case <-cluster.Done():
		}
		u.log.Warn("the database ended; starting it again", "err", cluster.Wait())
		next, err := u.startCluster(ctx)
		if err != nil {
			if ctx.Err() == nil {
				u.fail(fmt.Errorf("start the database again: %w", err))
			}
			return
		}
		cluster = next
	}
}

// clusterStop is what a fast shutdown may take; it needs milliseconds as a rule.
const clusterStop = 4 * time.Second
