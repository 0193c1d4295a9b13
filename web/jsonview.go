package web

import (
	"bytes"
	"encoding/json"
	"html/template"
	"strings"
)

// maxShownJSON is how much of a JSON text a page shows; the whole is at the
// API's address of the task.
const maxShownJSON = 256 << 10

// prettyJSON writes JSON text in lines, with the names of members in bold. The
// text of numbers is kept: it never becomes a float.
func prettyJSON(raw []byte) template.HTML {
	if len(raw) == 0 {
		return ""
	}
	var buf bytes.Buffer
	if err := json.Indent(&buf, raw, "", "  "); err != nil {
		buf.Reset()
		buf.Write(raw)
	}
	text := strings.ToValidUTF8(buf.String(), "\uFFFD")
	cut := len(text) > maxShownJSON
	if cut {
		text = strings.ToValidUTF8(text[:maxShownJSON], "")
	}
	var b strings.Builder
	for line := range strings.Lines(text) {
		inner := strings.TrimLeft(line, " ")
		b.WriteString(line[:len(line)-len(inner)])
		if name := memberName(inner); name != "" {
			b.WriteString("<b>" + escapeVisible(name) + "</b>")
			inner = inner[len(name):]
		}
		b.WriteString(escapeVisible(inner))
	}
	if cut {
		b.WriteString("\n…")
	}
	return template.HTML(b.String()) //nolint:gosec // every text went through HTMLEscapeString
}

// escapeVisible escapes text and makes characters visible that would reorder
// or hide it.
func escapeVisible(text string) string {
	return template.HTMLEscapeString(strings.Map(func(r rune) rune {
		if invisible(r) || r < 0x20 && r != '\n' && r != '\t' || r >= 0x7f && r < 0xa0 {
			return '\uFFFD'
		}
		return r
	}, text))
}

// memberName gives the quoted name and its colon at the start of a line of
// indented JSON, or "" when it does not begin with one.
func memberName(line string) string {
	if !strings.HasPrefix(line, `"`) {
		return ""
	}
	for i := 1; i < len(line); i++ {
		switch line[i] {
		case '\\':
			i++
		case '"':
			if i+1 < len(line) && line[i+1] == ':' {
				return line[:i+2]
			}
			return ""
		}
	}
	return ""
}

// compactJSON writes JSON in one line for a row of a list, cut to a length.
func compactJSON(raw []byte, limit int) string {
	var buf bytes.Buffer
	if err := json.Compact(&buf, raw); err != nil {
		return ""
	}
	return clip(buf.String(), limit)
}

// clip cuts text to a number of characters.
func clip(text string, limit int) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	n := 0
	for i := range text {
		if n == limit {
			return text[:i] + "…"
		}
		n++
	}
	return text
}
