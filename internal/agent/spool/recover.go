package spool

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
)

// name is the folder of a task.
func name(task int64, attempt int32, limit int64) string {
	return fmt.Sprintf("%d-%d-%d", task, attempt, limit)
}

// Found is a spool that an earlier start has left.
type Found struct {
	Task    int64
	Attempt int32
	dir     string
	limit   int64
}

// Find lists the spools below folder.
func Find(folder string) ([]Found, error) {
	entries, err := os.ReadDir(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var all []Found
	for _, e := range entries {
		f := Found{dir: filepath.Join(folder, e.Name())}
		if _, err := fmt.Sscanf(e.Name(), "%d-%d-%d", &f.Task, &f.Attempt, &f.limit); err != nil {
			continue // none of ours
		}
		all = append(all, f)
	}
	return all, nil
}

// Remove takes its files away.
func (f Found) Remove() error { return os.RemoveAll(f.dir) }

// Open reads what was left. Nothing can be written to it any more. Chunks that
// were acknowledged may come again: they are the same.
func (f Found) Open() (*Spool, error) {
	s := &Spool{dir: f.dir, limit: f.limit}
	entries, err := os.ReadDir(f.dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		g := &segment{}
		var half string
		if _, err := fmt.Sscanf(e.Name(), "%4s-%d", &half, &g.no); err != nil {
			continue
		}
		g.tail = half == "tail"
		if err := s.load(g); err != nil {
			return nil, err
		}
		s.segs = append(s.segs, g)
	}
	sort.Slice(s.segs, func(i, j int) bool { return s.segs[i].no < s.segs[j].no })
	for _, g := range s.segs {
		s.count(g)
	}
	if s.inTail {
		s.cut(s.tail - s.half())
	}
	s.ended = true
	return s, nil
}

// load reads a segment as far as its records are whole.
func (s *Spool) load(g *segment) error {
	file, err := os.Open(s.path(g))
	if err != nil {
		return err
	}
	defer file.Close()
	for {
		c, err := decode(file, g.size)
		if err != nil {
			return nil //nolint:nilerr // the end, as far as anybody can know
		}
		g.add(c)
	}
}

// count adds what a segment says of the whole.
func (s *Spool) count(g *segment) {
	s.last = g.no
	s.seq = max(s.seq, g.lastSeq+1)
	for stream, end := range g.ends {
		s.stored[stream] = max(s.stored[stream], end)
		s.printed[stream] = s.stored[stream]
	}
	if g.tail {
		s.inTail = true
		s.tail += g.cost
	}
}
