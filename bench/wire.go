package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"
)

// wire is one keep-alive HTTP/1.1 connection of a load generator. It does
// little more than write a request and read its answer, since it shares the
// processors with what it measures: net/http costs three times as much.
type wire struct {
	conn net.Conn
	in   *bufio.Reader
	body []byte
}

// wireTimeout bounds one request.
const wireTimeout = 2 * time.Minute

func dialWire(host string) (*wire, error) {
	conn, err := net.Dial("tcp", host) //nolint:noctx // a local port
	if err != nil {
		return nil, err
	}
	return &wire{conn: conn, in: bufio.NewReaderSize(conn, 64<<10)}, nil
}

func (w *wire) close() { w.conn.Close() }

// request gives the bytes of a POST with a JSON body.
func request(host, path, token string, body []byte) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "POST %s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n",
		path, host, token, len(body))
	b.Write(body)
	return b.Bytes()
}

// do sends a request and gives status and body, which is valid until the next.
func (w *wire) do(request []byte) (status int, body []byte, err error) {
	if err := w.conn.SetDeadline(time.Now().Add(wireTimeout)); err != nil {
		return 0, nil, err
	}
	if _, err := w.conn.Write(request); err != nil {
		return 0, nil, err
	}
	return w.read()
}

func (w *wire) read() (status int, body []byte, err error) {
	line, err := w.in.ReadSlice('\n')
	if err != nil {
		return 0, nil, err
	}
	if len(line) < 12 || !bytes.HasPrefix(line, []byte("HTTP/1.1 ")) {
		return 0, nil, fmt.Errorf("not an HTTP answer: %q", line)
	}
	if status, err = strconv.Atoi(string(line[9:12])); err != nil {
		return 0, nil, err
	}
	length, chunked, err := w.headers()
	if err != nil {
		return 0, nil, err
	}
	w.body = w.body[:0]
	switch {
	case chunked:
		err = w.chunks()
	case length < 0:
		err = errors.New("the answer does not say how long it is")
	default:
		err = w.more(length)
	}
	return status, w.body, err
}

// headers reads to the end of the header block.
func (w *wire) headers() (length int, chunked bool, err error) {
	length = -1
	for {
		line, err := w.in.ReadSlice('\n')
		if err != nil {
			return 0, false, err
		}
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			return length, chunked, nil
		}
		name, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimSpace(value)
		switch {
		case bytes.EqualFold(name, []byte("Content-Length")):
			if length, err = strconv.Atoi(string(value)); err != nil {
				return 0, false, err
			}
		case bytes.EqualFold(name, []byte("Transfer-Encoding")):
			chunked = bytes.EqualFold(value, []byte("chunked"))
		}
	}
}

// more appends n bytes to the body.
func (w *wire) more(n int) error {
	have := len(w.body)
	w.body = append(w.body, make([]byte, n)...)
	_, err := io.ReadFull(w.in, w.body[have:])
	return err
}

func (w *wire) chunks() error {
	for {
		line, err := w.in.ReadSlice('\n')
		if err != nil {
			return err
		}
		n, err := strconv.ParseInt(string(bytes.TrimSpace(line)), 16, 32)
		if err != nil {
			return err
		}
		if err := w.more(int(n)); err != nil {
			return err
		}
		if _, err := w.in.Discard(len("\r\n")); err != nil {
			return err
		}
		if n == 0 {
			return nil
		}
	}
}
