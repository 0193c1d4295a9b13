package listener_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"headgate/listener"
)

// pair connects to addr and accepts the connection.
func pair(t *testing.T, l *listener.Listener, addr string) (client, server net.Conn) {
	t.Helper()
	client, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	if server, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	return client, server
}

func drain(ctx context.Context, l *listener.Listener) <-chan error {
	result := make(chan error, 1)
	go func() { result <- l.Drain(ctx) }()
	return result
}

// draining waits until the public port refuses under a drain.
func draining(t *testing.T, l *listener.Listener, public string) {
	t.Helper()
	waitFor(t, "the public port to refuse", func() bool {
		c, err := net.Dial("tcp", public)
		if err == nil {
			c.Close()
		}
		return err != nil && l.Ports().State == listener.StateDraining
	})
}

func TestDrainRefusesPublicFirstAndControllerLast(t *testing.T) {
	t.Parallel()
	l := start(t)
	public := open(t, l)
	client, server := pair(t, l, public)
	first, second := drain(context.Background(), l), drain(context.Background(), l)
	draining(t, l, public)
	ended := answer(t, l)
	wantRefused(t, public)
	wantAnswer(t, l.Addr().String(), listener.PortController)
	if ln, err := net.Listen("tcp", public); err == nil {
		ln.Close()
		t.Error("the public port could be taken during the drain")
	}
	if _, err := io.WriteString(server, "still here"); err != nil {
		t.Fatal(err)
	}
	server.Close()
	if b, err := io.ReadAll(client); err != nil || string(b) != "still here" {
		t.Errorf("the live connection read %q, %v", b, err)
	}
	for _, d := range []<-chan error{first, second} {
		if err := <-d; err != nil {
			t.Errorf("Drain: %v", err)
		}
	}
	if err := <-ended; !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept after the drain: %v", err)
	}
	wantRefused(t, l.Addr().String())
	if err := l.Drain(t.Context()); err != nil {
		t.Errorf("Drain after the end: %v", err)
	}
}

func TestDrainEndsAtItsDeadline(t *testing.T) {
	t.Parallel()
	l := start(t)
	client, _ := pair(t, l, open(t, l))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := l.Drain(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Drain: %v", err)
	}
	_ = client.SetReadDeadline(time.Now().Add(patience))
	if _, err := client.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the connection outlived the drain: %v", err)
	}
	if s := l.Status(); s.State != listener.StateClosed || s.Public.Conns != 0 {
		t.Errorf("status is %+v", s)
	}
}

func TestDrainInEveryPhase(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]func(*listener.Listener){
		"controller only": func(*listener.Listener) {},
		"settling":        func(l *listener.Listener) { l.MarkStable("test") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := start(t, func(c *listener.Config) { c.OpenDelay = time.Hour })
			prepare(l)
			if err := l.Drain(t.Context()); err != nil {
				t.Fatal(err)
			}
			l.MarkStable("too late")
			if r := l.Ports(); r.State != listener.StateClosed {
				t.Fatalf("state is %s", r.State)
			}
		})
	}
}

func TestCloseEndsADrain(t *testing.T) {
	t.Parallel()
	l := start(t)
	public := open(t, l)
	pair(t, l, public)
	result := drain(context.Background(), l)
	draining(t, l, public)
	l.Close()
	if err := <-result; !errors.Is(err, net.ErrClosed) {
		t.Fatalf("Drain: %v", err)
	}
}
