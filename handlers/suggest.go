package handlers

import (
	"slices"
	"strings"
)

// maxShown is how much of a wrong name is repeated to its sender.
const maxShown = 60

// clip shortens text from outside before it is repeated in an answer.
func clip(text string) string {
	text = strings.ToValidUTF8(text, "?")
	if len(text) <= maxShown {
		return text
	}
	return strings.ToValidUTF8(text[:maxShown], "") + "..."
}

// suggest names the nearest known name, or all of them when none is near.
func suggest(name string, known []string, what string) string {
	known = slices.Compact(slices.Sorted(slices.Values(known)))
	best, distance := "", 4 // farther than three letters is another word
	for _, k := range known {
		if d := editDistance(clip(name), k); d < distance && d < len(k) {
			best, distance = k, d
		}
	}
	if best != "" {
		return "Did you mean " + best + "?"
	}
	if len(known) == 0 {
		return "None is accepted here."
	}
	return "A " + what + " here is one of " + strings.Join(known, ", ") + "."
}

// editDistance counts the letters to change from a to b (Levenshtein).
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], cost
		}
	}
	return row[len(b)]
}
