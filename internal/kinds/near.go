package kinds

import "strings"

// nearest gives the candidate that somebody who wrote name most likely meant,
// or "" when none is close. Leaving out the family ("echo") counts as close.
func nearest(name string, candidates []string) string {
	name = strings.ToLower(name)
	if len(name) > maxShownName {
		return ""
	}
	best, bestDistance := "", len(name)/3+1
	for _, c := range candidates {
		_, short, _ := strings.Cut(c, ".")
		if d := min(distance(name, c), distance(name, short)+1); d <= bestDistance && d < len(c) {
			if d < bestDistance || best == "" {
				best, bestDistance = c, d
			}
		}
	}
	return best
}

// distance is the number of single-byte edits (insert, delete, replace) that
// turn a into b.
func distance(a, b string) int {
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
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
