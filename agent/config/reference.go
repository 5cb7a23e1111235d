package config

import (
	"fmt"
	"reflect"
	"sort"
	"strings"
)

// keys lists every key of the file, sorted.
func keys() []string {
	var out []string
	for _, field := range reflect.VisibleFields(reflect.TypeFor[Config]()) {
		if name := field.Tag.Get("toml"); name != "-" {
			out = append(out, name)
		}
	}
	sort.Strings(out)
	return out
}

// Reference is docs/config.md, made from the struct's tags so that it cannot
// say anything else than the code.
func Reference() string {
	var b strings.Builder
	b.WriteString("# /etc/bcd/config.toml\n\nMade from the code by `make docs`. An unknown key or a wrong value is an error that names file, line, column and the nearest right key.\n\n")
	b.WriteString("| key | default | what it is |\n|---|---|---|\n")
	for _, field := range reflect.VisibleFields(reflect.TypeFor[Config]()) {
		name := field.Tag.Get("toml")
		if name == "-" {
			continue
		}
		value := field.Tag.Get("default")
		if value == "" {
			value = "–"
		} else {
			value = "`" + value + "`"
		}
		text := field.Tag.Get("doc")
		if example := field.Tag.Get("example"); example != "" {
			text += " Example: `" + example + "`."
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", name, value, text)
	}
	return b.String()
}

// nearest gives the candidate that differs from word by the fewest edits, or
// "" when every one differs by more than a third of its length.
func nearest(word string, candidates []string) string {
	best, bestDistance := "", 1+len(word)
	for _, c := range candidates {
		if d := distance(word, c); d < bestDistance {
			best, bestDistance = c, d
		}
	}
	if bestDistance*3 > len(best)+2 {
		return ""
	}
	return best
}

// distance is Levenshtein's, over bytes.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diagonal := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := diagonal
			if a[i-1] != b[j-1] {
				cost++
			}
			diagonal = row[j]
			row[j] = min(cost, row[j]+1, row[j-1]+1)
		}
	}
	return row[len(b)]
}
