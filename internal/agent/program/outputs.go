package program

import (
	"io"
	"os"
	"sync"
	"time"
)

// outputs are the two pipes between the child and us.
type outputs struct{ r, w [2]*os.File }

func openOutputs() (*outputs, error) {
	o := &outputs{}
	for i := range o.r {
		var err error
		if o.r[i], o.w[i], err = os.Pipe(); err != nil {
			o.close()
			return nil, err
		}
	}
	return o, nil
}

func (o *outputs) closeWriters() {
	for _, f := range o.w {
		f.Close()
	}
}

// close may be called again; closing twice does nothing.
func (o *outputs) close() {
	for i := range o.r {
		if o.r[i] != nil {
			o.r[i].Close()
			o.w[i].Close()
		}
	}
}

// stop ends the copying, whoever still holds the pipes.
func (o *outputs) stop() {
	for _, f := range o.r {
		_ = f.SetReadDeadline(time.Unix(1, 0)) // a pipe that cannot do it is closed already
	}
}

// copyTo hands all that is printed to the sink; the channel closes at the end
// of both streams.
func (o *outputs) copyTo(sink Sink) <-chan struct{} {
	done := make(chan struct{})
	var wg sync.WaitGroup
	for i, s := range []Stream{Stdout, Stderr} {
		wg.Go(func() { copyStream(o.r[i], s, sink) })
	}
	go func() {
		wg.Wait()
		close(done)
	}()
	return done
}

func copyStream(r io.Reader, s Stream, sink Sink) {
	buf := make([]byte, readSize)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			sink.Write(s, buf[:n])
		}
		if err != nil {
			return
		}
	}
}
