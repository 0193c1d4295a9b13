package controller

import (
	"crypto/tls"
	"encoding/binary"
	"io"
	"testing"
	"time"
)

// TestOneConnectionHasABoundedNumberOfStreams reads what the server says of
// itself at the begin of an HTTP/2 connection.
func TestOneConnectionHasABoundedNumberOfStreams(t *testing.T) {
	t.Parallel()
	s := start(t, "postgres://127.0.0.1:1/none?sslmode=disable", t.TempDir())
	conn, err := tls.Dial("tcp", s.c.listener.Addr().String(), &tls.Config{
		InsecureSkipVerify: true, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"); err != nil {
		t.Fatal(err)
	}
	head := make([]byte, 9)
	if _, err := io.ReadFull(conn, head); err != nil || head[3] != 4 {
		t.Fatalf("no SETTINGS first: % x, %v", head, err)
	}
	settings := make([]byte, int(head[1])<<8|int(head[2]))
	if _, err := io.ReadFull(conn, settings); err != nil {
		t.Fatal(err)
	}
	for ; len(settings) >= 6; settings = settings[6:] {
		const maxConcurrentStreams = 3
		if binary.BigEndian.Uint16(settings) == maxConcurrentStreams {
			if n := binary.BigEndian.Uint32(settings[2:]); n != 100 {
				t.Errorf("%d streams, want 100", n)
			}
			return
		}
	}
	t.Error("no bound is named")
}
