package tasks

import (
	"strings"
	"unicode/utf8"
)

// validText says whether the database can hold s as text.
func validText(s string) bool { return utf8.ValidString(s) && strings.IndexByte(s, 0) < 0 }

// safeText makes any bytes into text of at most limit bytes; what cannot be
// shown becomes the replacement character.
func safeText(s string, limit int) string {
	if len(s) <= limit && validText(s) {
		return s
	}
	s = strings.ToValidUTF8(s, "\uFFFD")
	s = strings.ReplaceAll(s, "\x00", "\uFFFD")
	if len(s) <= limit {
		return s
	}
	const mark = "..."
	cut := limit - len(mark)
	for cut > 0 && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + mark
}
