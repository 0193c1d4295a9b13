package main

import (
	"os"
	"syscall"
	"testing"
	"time"
)

func TestTheSecondSignalEndsTheProgram(t *testing.T) {
	t.Parallel()
	signals, codes := make(chan os.Signal), make(chan int, 1)
	ctx := untilSignal(signals, func(code int) { codes <- code })
	signals <- syscall.SIGTERM
	select {
	case <-ctx.Done():
	case <-time.After(20 * time.Second):
		t.Fatal("the first signal does not end the context")
	}
	select {
	case code := <-codes:
		t.Fatalf("the first signal ended the program with %d", code)
	default:
	}
	signals <- os.Interrupt
	if code := <-codes; code != 130 {
		t.Errorf("exit code %d, want 130", code)
	}
}
