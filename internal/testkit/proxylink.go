package testkit

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// Types of messages of PostgreSQL's protocol, version 3. The letters of the
// two directions overlap.
const (
	// Sent by the client.
	msgQuery   = 'Q'
	msgParse   = 'P'
	msgBind    = 'B'
	msgExecute = 'E'
	msgClose   = 'C'
	// Sent by the server.
	msgCommandComplete = 'C'
	msgError           = 'E'
	msgReady           = 'Z'
	msgCopyIn          = 'G'
	msgCopyOut         = 'H'
	msgCopyBoth        = 'W'

	// What msgReady says of a session outside a transaction block.
	statusIdle = 'I'

	// First four bytes after the length, instead of a protocol version.
	codeSSL = 80877103
	codeGSS = 80877104

	// maxMessage is the server's own limit; more means lost framing.
	maxMessage = 1 << 30
)

// link is one connection through the proxy.
type link struct {
	proxy  *Proxy
	client *net.TCPConn

	mu     sync.Mutex // guards what follows
	server net.Conn
	ended  bool
	gone   chan struct{} // closed when ended
	armed  *Fault        // for the request that is under way
	block  bool          // inside a transaction block, as the server last said
	// statements and portals by name; used by the client's side only
	statements, portals map[string]string
}

// run serves the link until one side ends.
func (l *link) run() {
	defer l.end(FIN)
	if !l.proxy.flow(l) {
		return
	}
	server, err := net.DialTimeout(l.proxy.network, l.proxy.address, proxyDialTimeout)
	if err != nil {
		return // the client sees a closed connection, as from a dead server
	}
	l.mu.Lock()
	l.server = server
	ended := l.ended
	l.mu.Unlock()
	if ended {
		_ = server.Close()
		return
	}
	l.statements, l.portals = map[string]string{}, map[string]string{}
	var back sync.WaitGroup
	back.Go(func() {
		how, err := l.fromServer(bufio.NewReader(server))
		if err != nil && !isClosed(err) {
			how = RST // the server's side broke; so does ours
		}
		l.end(how)
	})
	_ = l.fromClient(bufio.NewReader(l.client))
	l.closeServer()
	back.Wait()
}

// fromClient passes on what the client sends, noting what it executes.
func (l *link) fromClient(in *bufio.Reader) error {
	first := true
	for {
		kind, msg, err := readMessage(in, first)
		if err != nil {
			return err
		}
		if !l.proxy.flow(l) {
			return net.ErrClosed
		}
		if first && asksEncryption(msg) {
			if _, err := l.client.Write([]byte{'N'}); err != nil { // no, thank you
				return err
			}
			continue
		}
		if f := l.note(kind, msg); f != nil && f.Before && f.strike("") {
			l.end(f.How)
			return net.ErrClosed
		}
		first = false
		if _, err := l.server.Write(msg); err != nil {
			return err
		}
	}
}

// asksEncryption says whether an untyped message asks for TLS or GSSAPI. The
// proxy could not read on if the server agreed.
func asksEncryption(msg []byte) bool {
	code := binary.BigEndian.Uint32(msg[4:])
	return code == codeSSL || code == codeGSS
}

// note follows the names of statements and portals, to know the text of what is
// executed, and gives the fault that is to strike.
func (l *link) note(kind byte, msg []byte) *Fault {
	if kind == 0 || len(msg) <= 5 {
		return nil // start of the session, or nothing in it
	}
	body := msg[5:]
	text, executes := "", false
	switch kind {
	case msgQuery:
		text, _ = cString(body)
		executes = true
	case msgParse:
		name, rest := cString(body)
		l.statements[name], _ = cString(rest)
	case msgBind:
		portal, rest := cString(body)
		name, _ := cString(rest)
		l.portals[portal] = l.statements[name]
	case msgExecute:
		portal, _ := cString(body)
		text, executes = l.portals[portal], true
	case msgClose:
		if name, _ := cString(body[1:]); body[0] == 'S' {
			delete(l.statements, name)
		} else {
			delete(l.portals, name)
		}
	}
	if !executes {
		return nil
	}
	l.mu.Lock()
	alone := !l.block
	l.mu.Unlock()
	f := l.proxy.executed(text, alone)
	if f != nil {
		l.mu.Lock()
		l.armed = f
		l.mu.Unlock()
	}
	return f
}

// fromServer passes on what the server sends. While a fault is armed it holds
// the answer back until the server is ready for the next request, and decides
// then.
func (l *link) fromServer(in *bufio.Reader) (How, error) {
	var held bytes.Buffer
	tag, failed := "", false
	for {
		kind, msg, err := readMessage(in, false)
		if err != nil {
			return FIN, err
		}
		if !l.proxy.flow(l) {
			return FIN, net.ErrClosed
		}
		f := l.fault()
		held.Write(msg)
		switch kind {
		case msgCommandComplete:
			tag, _ = cString(msg[5:])
		case msgError:
			failed = true
		case msgReady:
			l.setBlock(len(msg) > 5 && msg[5] != statusIdle)
			if f != nil && !f.Before && tag != "" && !failed && f.strike(tag) {
				return f.How, nil
			}
			l.disarm(f)
			tag, failed, f = "", false, nil
		case msgCopyIn, msgCopyOut, msgCopyBoth:
			f = nil // the client must see this to go on; the rest is held again
		}
		if f != nil {
			continue
		}
		if _, err := l.client.Write(held.Bytes()); err != nil {
			return FIN, err
		}
		held.Reset()
	}
}

func (l *link) fault() *Fault {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.armed
}

func (l *link) setBlock(inside bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.block = inside
}

// disarm ends the watch over a request, unless another has begun.
func (l *link) disarm(f *Fault) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.armed == f {
		l.armed = nil
	}
}

// end closes both sides, the client's in the given way. Only the first call
// counts.
func (l *link) end(how How) {
	l.mu.Lock()
	if l.ended {
		l.mu.Unlock()
		return
	}
	l.ended = true
	close(l.gone)
	server := l.server
	l.mu.Unlock()
	if how == RST {
		_ = l.client.SetLinger(0)
	} else {
		l.finish()
	}
	_ = l.client.Close()
	if server != nil {
		_ = server.Close()
	}
}

// finish says the orderly end and reads until the client has said its own:
// closing with unread data would send RST instead.
func (l *link) finish() {
	if l.client.CloseWrite() != nil {
		return
	}
	_ = l.client.SetReadDeadline(time.Now().Add(finLinger))
	_, _ = io.Copy(io.Discard, l.client)
}

func (l *link) closeServer() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.server != nil {
		_ = l.server.Close()
	}
}

// readMessage reads one message whole. Untyped messages are those before the
// session begins.
func readMessage(in *bufio.Reader, untyped bool) (kind byte, msg []byte, err error) {
	head := make([]byte, 5)
	if untyped {
		head = head[:4]
	}
	if _, err := io.ReadFull(in, head); err != nil {
		return 0, nil, err
	}
	size := binary.BigEndian.Uint32(head[len(head)-4:])
	if size < 4 || size > maxMessage || (untyped && size < 8) {
		return 0, nil, fmt.Errorf("proxy: message of %d bytes", size)
	}
	msg = make([]byte, len(head)+int(size)-4)
	copy(msg, head)
	if _, err := io.ReadFull(in, msg[len(head):]); err != nil {
		return 0, nil, err
	}
	if !untyped {
		kind = msg[0]
	}
	return kind, msg, nil
}

// cString cuts a text that ends with a zero byte.
func cString(b []byte) (text string, rest []byte) {
	head, rest, _ := bytes.Cut(b, []byte{0})
	return string(head), rest
}
