package web

import (
	"bytes"
	"context"
	"fmt"
	"html/template"
	"strconv"
	"strings"
	"time"

	"headgate/internal/fault"
	"headgate/tasks"
)

// Limits of the output viewer; the whole is always one click away as Raw.
const (
	maxLineBytes  = 16 << 10 // of one line: longer ones are data, not text
	windowLines   = 2000     // at once: the browser's own search stays instant
	windowBytes   = 1 << 20  // read for one window
	maxSkipped    = 8 << 20  // read for a window that shows nothing: inside of one endless line
	chunksPerRead = 16       // of up to 64 KiB each
)

// outLine is one line of output.
type outLine struct {
	N      int
	Stream string
	At     time.Time
	HTML   template.HTML
	Cut    bool  // only its beginning is shown
	Open   bool  // its end has not come yet
	Gap    int64 // bytes of the stream that are missing here; there is no text then
}

// place is where reading a stream goes on: a chunk and a byte in it.
type place struct {
	seq, off int
	at       int64 // of that byte in the stream, as printed
	color    sgr
	skipping bool // the rest of a line that was too long is not wanted
}

// cursor is where reading an output goes on. Lines are numbered over both
// streams, in the order in which they ended.
type cursor struct {
	attempt int
	line    int // number of the last complete line
	streams [2]place
}

// move makes a byte of a chunk the place.
func (p *place) move(c tasks.OutputChunk, off int) {
	p.seq, p.off, p.at = c.Seq, off, c.Offset+int64(off)
}

func streamIndex(name string) int {
	if name == "stderr" {
		return 1
	}
	return 0
}

// String writes the cursor for an address.
func (c cursor) String() string {
	parts := []int{c.attempt, c.line}
	for _, p := range c.streams {
		skipping := 0
		if p.skipping {
			skipping = 1
		}
		parts = append(parts, p.seq, p.off, p.color.code(), skipping, int(p.at))
	}
	text := make([]string, len(parts))
	for i, n := range parts {
		text[i] = strconv.Itoa(n)
	}
	return strings.Join(text, "-")
}

func readCursor(text string) (cursor, error) {
	var c cursor
	if text == "" {
		return c, nil
	}
	parts := strings.Split(text, "-")
	nums := make([]int, len(parts))
	for i, p := range parts {
		n, err := strconv.Atoi(p)
		if err != nil || n < 0 {
			return c, badCursor()
		}
		nums[i] = n
	}
	if len(nums) != 12 {
		return c, badCursor()
	}
	c.attempt, c.line = nums[0], nums[1]
	for i := range c.streams {
		p := nums[2+5*i:]
		c.streams[i] = place{seq: p[0], off: p[1], color: uncode(p[2]), skipping: p[3] == 1, at: int64(p[4])}
	}
	return c, nil
}

func badCursor() error {
	return fault.New(fault.Malformed, "bad_parameter", "The place in the output is not one that this page gave.").
		WithHint("Open the task again.")
}

// window is a part of an output.
type window struct {
	Lines []outLine
	Next  cursor
	More  bool // there is more to read now
	Reset bool // the output belongs to another attempt than the cursor
}

// Empty says whether nothing at all was printed so far.
func (w window) Empty() bool { return len(w.Lines) == 0 && w.Next.line == 0 }

type fetchOutput func(ctx context.Context, id tasks.ID, fromSeq, limit int) ([]tasks.OutputChunk, error)

// lineReader cuts chunks into lines.
type lineReader struct {
	win  window
	open [2][]byte    // the part of a line that has come
	at   [2]time.Time // when it began
	from [2]place     // where it began
	read int
}

// readWindow reads lines from a cursor on.
func readWindow(ctx context.Context, fetch fetchOutput, id tasks.ID, from cursor) (window, error) {
	l := &lineReader{win: window{Next: from}, from: from.streams}
	seq := min(from.streams[0].seq, from.streams[1].seq)
	for {
		chunks, err := fetch(ctx, id, seq, chunksPerRead)
		if err != nil {
			return window{}, fmt.Errorf("read output: %w", err)
		}
		for _, c := range chunks {
			if from.attempt != 0 && c.Attempt != from.attempt {
				return window{Reset: true}, nil
			}
			l.win.Next.attempt = c.Attempt
			if full := l.chunk(c); full {
				l.win.More = true
				return l.win, nil
			}
			seq = c.Seq + 1
		}
		if len(chunks) < chunksPerRead {
			l.finish(seq)
			return l.win, nil
		}
	}
}

// chunk takes the lines of one chunk; true when the window is full.
func (l *lineReader) chunk(c tasks.OutputChunk) bool {
	s := streamIndex(c.Stream)
	p := &l.win.Next.streams[s]
	if c.Seq < p.seq {
		return false // read before, for the other stream
	}
	off := 0
	if c.Seq == p.seq {
		off = min(p.off, len(c.Data))
	}
	if off == 0 {
		l.gap(s, c)
	}
	l.read += len(c.Data) - off
	for {
		data := c.Data[off:]
		end := bytes.IndexByte(data, '\n')
		if end < 0 {
			l.keep(s, c, off, data)
			break
		}
		l.keep(s, c, off, data[:end])
		off += end + 1
		l.emit(s, c, off)
		if len(l.win.Lines) >= windowLines {
			l.settle(s, c.Seq)
			return true
		}
	}
	if len(l.open[s]) == 0 { // all of it is in complete lines
		*p = place{seq: c.Seq + 1, at: c.Offset + int64(len(c.Data)), color: p.color, skipping: p.skipping}
		l.from[s] = *p
	}
	if l.read >= windowBytes && (len(l.win.Lines) > 0 || l.read >= maxSkipped) {
		l.settle(s, c.Seq)
		return true
	}
	return false
}

// keep adds to the line that is under way. What goes beyond the limit is
// shown at once as a cut line; the rest up to its end is passed over.
func (l *lineReader) keep(s int, c tasks.OutputChunk, off int, part []byte) {
	p := &l.win.Next.streams[s]
	if p.skipping || len(part) == 0 {
		if p.skipping {
			p.move(c, off+len(part))
			l.from[s] = *p
		}
		return
	}
	if len(l.open[s]) == 0 {
		l.from[s], l.at[s] = *p, c.At
		l.from[s].move(c, off)
	}
	if room := maxLineBytes - len(l.open[s]); len(part) > room {
		l.open[s] = append(l.open[s], part[:room]...)
		l.add(s, outLine{Cut: true})
		p.move(c, off+len(part))
		p.skipping = true
		l.from[s] = *p
		return
	}
	l.open[s] = append(l.open[s], part...)
}

// emit ends the line that is under way; the next begins at off.
func (l *lineReader) emit(s int, c tasks.OutputChunk, off int) {
	p := &l.win.Next.streams[s]
	if p.skipping {
		p.skipping = false
	} else {
		if len(l.open[s]) == 0 {
			l.at[s] = c.At
		}
		l.add(s, outLine{})
	}
	p.move(c, off)
	l.from[s] = *p
}

// gap shows what is missing of a stream before a chunk: a line of its own, which
// ends the one that was under way.
func (l *lineReader) gap(s int, c tasks.OutputChunk) {
	p := &l.win.Next.streams[s]
	missing := c.Offset - p.at - int64(len(l.open[s]))
	if missing <= 0 {
		return
	}
	if len(l.open[s]) > 0 {
		l.add(s, outLine{})
	}
	l.at[s], p.skipping = c.At, false
	l.add(s, outLine{Gap: missing})
	p.move(c, 0)
	l.from[s] = *p
}

func (l *lineReader) add(s int, line outLine) {
	l.win.Next.line++
	p := &l.win.Next.streams[s]
	line.N, line.Stream, line.At = l.win.Next.line, streamName(s), l.at[s]
	line.HTML = paint(&p.color, l.open[s])
	l.win.Lines = append(l.win.Lines, line)
	l.open[s] = l.open[s][:0]
}

func streamName(s int) string {
	if s == 1 {
		return "stderr"
	}
	return "stdout"
}

// settle makes the cursor go on where the open lines began.
func (l *lineReader) settle(current, seq int) {
	for s := range l.win.Next.streams {
		p := &l.win.Next.streams[s]
		switch {
		case len(l.open[s]) > 0:
			*p = l.from[s]
		case s != current:
			p.seq, p.off = max(p.seq, seq+1), 0
		}
	}
}

// finish shows the lines that have no end yet, at the bottom.
func (l *lineReader) finish(seq int) {
	l.settle(-1, seq-1)
	n := l.win.Next.line
	for s := range l.open {
		if len(l.open[s]) == 0 {
			continue
		}
		n++
		color := l.win.Next.streams[s].color
		l.win.Lines = append(l.win.Lines, outLine{N: n, Stream: streamName(s), At: l.at[s], Open: true, HTML: paint(&color, l.open[s])})
	}
}
