package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"strings"
	"syscall"
	"testing"
)

func TestSettingsThatAreNoGoodAreSaidAtAReload(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	signals, done := make(chan os.Signal), make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	results := []error{errors.New("line 3: no such setting"), nil}
	go func() {
		defer close(done)
		reloadAt(ctx, signals, slog.New(slog.NewTextHandler(&log, nil)), func() error {
			err := results[0]
			results = results[1:]
			return err
		})
	}()
	signals <- syscall.SIGHUP
	signals <- syscall.SIGHUP
	cancel()
	<-done
	if len(results) != 0 || strings.Count(log.String(), "not reloaded and nothing has changed") != 1 || !strings.Contains(log.String(), "line 3") {
		t.Errorf("%d reloads left, log:\n%s", len(results), &log)
	}
}
