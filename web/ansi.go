package web

import (
	"html/template"
	"strconv"
	"strings"
	"unicode/utf8"
)

// What a program printed is hostile input. It is escaped first; of its control
// sequences only colours and bold remain, as classes of style.css; everything
// else that could move the cursor, set a title, or turn the direction of text
// is dropped or made visible.

// sgr is the state that colour sequences leave behind for the next text.
type sgr struct {
	bold  bool
	color int // 0 = default, otherwise 31 to 36 or 90
}

// code packs the state into a number for a cursor, and uncode reads it.
func (s sgr) code() int {
	if s.bold {
		return s.color + 100
	}
	return s.color
}

func uncode(n int) sgr {
	s := sgr{bold: n >= 100, color: n % 100}
	if s.color != 90 && (s.color < 31 || s.color > 36) {
		s.color = 0
	}
	return s
}

// apply reads the parameters of one colour sequence.
func (s *sgr) apply(params string) {
	fields := strings.FieldsFunc(params, func(c rune) bool { return c == ';' || c == ':' })
	if len(fields) == 0 {
		*s = sgr{}
	}
	for i := 0; i < len(fields); i++ {
		n, err := strconv.Atoi(fields[i])
		if err != nil {
			return
		}
		switch {
		case n == 0:
			*s = sgr{}
		case n == 1:
			s.bold = true
		case n == 22:
			s.bold = false
		case n == 30, n == 37, n == 39, n == 97:
			s.color = 0
		case n >= 31 && n <= 36, n == 90:
			s.color = n
		case n >= 91 && n <= 96:
			s.color = n - 60
		case n == 38, n == 48: // extended colours have no place in the palette
			i += extended(fields[i+1:])
		}
	}
}

// extended gives how many parameters of an extended colour follow.
func extended(rest []string) int {
	switch {
	case len(rest) > 0 && rest[0] == "5":
		return 2
	case len(rest) > 0 && rest[0] == "2":
		return 4
	}
	return 0
}

func (s sgr) class() string {
	var c []string
	if s.bold {
		c = append(c, "a1")
	}
	if s.color != 0 {
		c = append(c, "a"+strconv.Itoa(s.color))
	}
	return strings.Join(c, " ")
}

// painter writes text in pieces of one look each.
type painter struct {
	out  strings.Builder
	run  strings.Builder
	look string // of the text in run
}

func (p *painter) text(r rune, look string) {
	if look != p.look {
		p.flush()
		p.look = look
	}
	p.run.WriteRune(r)
}

func (p *painter) flush() {
	if p.run.Len() == 0 {
		return
	}
	text := template.HTMLEscapeString(p.run.String())
	if p.look == "" {
		p.out.WriteString(text)
	} else {
		p.out.WriteString(`<span class="` + p.look + `">` + text + `</span>`)
	}
	p.run.Reset()
}

// paint turns one line, without its end, into HTML and moves the colour state
// on. A carriage return inside starts the line anew, as on a terminal.
func paint(state *sgr, line []byte) template.HTML {
	var p painter
	for i := 0; i < len(line); {
		r, n := utf8.DecodeRune(line[i:])
		switch {
		case r == 0x1b || r == 0x9b || r == 0x90 || r == 0x9d:
			i += skipSequence(state, line[i:], r, n)
			continue
		case r == '\r':
			if i+n < len(line) && strings.Trim(string(line[i+n:]), "\r") != "" {
				p = painter{look: state.class()}
			}
		case r == '\t':
			p.text(r, state.class())
		case r < 0x20 || r >= 0x7f && r < 0xa0: // other controls say nothing on a page
		case invisible(r):
			p.text(utf8.RuneError, state.class())
		default:
			p.text(r, state.class())
		}
		i += n
	}
	p.flush()
	return template.HTML(p.out.String()) //nolint:gosec // every text went through HTMLEscapeString
}

// invisible tells characters that reorder or hide text.
func invisible(r rune) bool {
	return r == 0x061c || r >= 0x200b && r <= 0x200f || r >= 0x202a && r <= 0x202e || r >= 0x2060 && r <= 0x206f || r == 0xfeff
}

// skipSequence gives the length of the control sequence at the start of b, at
// least n; colours are applied.
func skipSequence(state *sgr, b []byte, r rune, n int) int {
	i := n
	kind := byte(0)
	switch {
	case r == 0x9b:
		kind = '['
	case r != 0x1b:
		kind = ']'
	case i < len(b):
		kind = b[i]
		i++
	default:
		return n
	}
	switch kind {
	case '[':
		return skipCSI(state, b, i)
	case ']', 'P', 'X', '^', '_':
		return skipString(b, i)
	}
	for kind >= 0x20 && kind <= 0x2f && i < len(b) { // intermediates before the final byte
		kind = b[i]
		i++
	}
	if kind < 0x20 || kind >= 0x7f {
		return n // not a sequence; the byte is looked at again
	}
	return i
}

func skipCSI(state *sgr, b []byte, i int) int {
	start := i
	for i < len(b) && b[i] >= 0x20 && b[i] <= 0x3f {
		i++
	}
	if i < len(b) && b[i] >= 0x40 && b[i] <= 0x7e {
		if b[i] == 'm' && strings.Trim(string(b[start:i]), "0123456789;:") == "" {
			state.apply(string(b[start:i]))
		}
		i++
	}
	return i
}

// skipString passes over a title, a hyperlink and the like, up to its end; one
// that has none takes the rest of the line.
func skipString(b []byte, i int) int {
	for i < len(b) {
		switch {
		case b[i] == 0x07:
			return i + 1
		case b[i] == 0x1b && i+1 < len(b) && b[i+1] == '\\':
			return i + 2
		}
		i++
	}
	return i
}
