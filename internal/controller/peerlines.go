package controller

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"

	"headgate/tasks"
)

// maxEventLine is far above what an event takes, in bytes.
const maxEventLine = 4 << 10

// lineReader reads events, one a line, and gives those together that have
// arrived together.
type lineReader struct{ in *bufio.Reader }

func newLineReader(r io.Reader) *lineReader { return &lineReader{bufio.NewReaderSize(r, 64<<10)} }

// next waits for a line and gives the events of all lines that are there; none
// after a sign of life.
func (l *lineReader) next() ([]tasks.PeerEvent, error) {
	var events []tasks.PeerEvent
	for {
		line, err := l.in.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) || len(line) > maxEventLine {
			return nil, errLongLine
		}
		if err != nil {
			return nil, err
		}
		if len(line) > 1 {
			var e tasks.PeerEvent
			if err := json.Unmarshal(line, &e); err != nil {
				return nil, err
			}
			events = append(events, e)
		}
		if l.in.Buffered() == 0 || len(events) >= maxEventBatch {
			return events, nil
		}
	}
}

// errLongLine says that a peer does not speak our language.
var errLongLine = errors.New("a line of events is too long")

// maxEventBatch bounds how many events are passed on together.
const maxEventBatch = 512
