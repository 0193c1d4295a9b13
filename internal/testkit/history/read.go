package history

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
)

// place is a line of a file: the file's number and the line's.
type place uint64

const lineBits = 40

func at(file, line int) place { return place(file)<<lineBits | place(line) }

func (p place) file() int { return int(p >> lineBits) }
func (p place) line() int { return int(p & (1<<lineBits - 1)) }

// maxLine bounds a line; longer ones are no events.
const maxLine = 1 << 20

// read gives every event of a file to add, with the number of its line. It says
// how many torn lines there were: the last one of a process that was killed.
func read(path string, add func(e *Event, line int)) (torn int, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	r := bufio.NewReaderSize(f, maxLine)
	bad := 0 // a line that is no event, if the next one is not the begin of a process
	for line := 1; ; line++ {
		b, err := r.ReadSlice('\n')
		if err == io.EOF && len(b) == 0 {
			return torn, nil
		}
		if err != nil && err != io.EOF {
			return torn, fmt.Errorf("%s:%d: %w", path, line, err)
		}
		whole := err == nil
		var e Event
		if json.Unmarshal(b, &e) != nil || e.Kind == "" {
			if bad != 0 {
				return torn, fmt.Errorf("%s:%d: not an event", path, bad)
			}
			bad = line
			torn++
			if !whole {
				return torn, nil
			}
			continue
		}
		if bad != 0 && e.Kind != KindOpen {
			return torn, fmt.Errorf("%s:%d: not an event", path, bad)
		}
		bad = 0
		add(&e, line)
		if !whole {
			return torn, nil
		}
	}
}

// lines reads the text of some lines of a file again, for a report.
func lines(path string, numbers []int) (map[int]string, error) {
	slices.Sort(numbers)
	texts := map[int]string{}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r := bufio.NewReaderSize(f, maxLine)
	for line := 1; len(numbers) > 0; line++ {
		b, err := r.ReadSlice('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		for len(numbers) > 0 && numbers[0] == line {
			texts[line] = string(bytes.TrimSpace(b))
			numbers = numbers[1:]
		}
		if err != nil {
			break
		}
	}
	return texts, nil
}
