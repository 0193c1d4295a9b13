package headgate_test

import (
	"go/ast"
	"go/token"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// documentedRow is a line of a table of docs/errors.md: its first cell is
// nothing but a code.
var documentedRow = regexp.MustCompile("(?m)^\\| `([a-z][a-z0-9_]*)` \\|")

// stableCode is what the product calls a code.
var stableCode = regexp.MustCompile(`^[a-z][a-z0-9_]*$`)

// faultMakers maps the functions of package fault that take a code to the
// place of the code among their arguments.
var faultMakers = map[string]int{"New": 1, "Newf": 1, "Wrap": 2}

// TestEveryCodeIsDocumented compares docs/errors.md with the shipped code:
// every code of a fault, every reason and every cause has a row, and every
// row has a code.
func TestEveryCodeIsDocumented(t *testing.T) {
	t.Parallel()
	documented := map[string]bool{}
	for _, m := range documentedRow.FindAllStringSubmatch(readFile(t, "docs/errors.md"), -1) {
		documented[m[1]] = true // several may be both a code and a reason
	}
	given, literals := map[string]string{}, map[string]bool{}
	for _, files := range shippedByPackage(t) {
		takers := codeTakers(files)
		for _, s := range files {
			collectCodes(s, takers, given, literals)
		}
	}
	if len(given) < 100 {
		t.Fatalf("only %d codes were found in the shipped code; the search is broken", len(given))
	}
	for _, code := range slices.Sorted(maps.Keys(given)) {
		if !documented[code] {
			t.Errorf("docs/errors.md has no row for %s of %s", code, given[code])
		}
	}
	for _, code := range slices.Sorted(maps.Keys(documented)) {
		if !literals[code] {
			t.Errorf("docs/errors.md has a row for %s, which no shipped code gives", code)
		}
	}
}

func shippedByPackage(t *testing.T) map[string][]source {
	t.Helper()
	all := map[string][]source{}
	for _, s := range sources(t) {
		if !s.test && !isTestSupport(s.dir) && !under(s.dir, "openapi/gen") && !strings.HasSuffix(s.name, ".pb.go") {
			all[s.dir] = append(all[s.dir], s)
		}
	}
	return all
}

// codeTakers finds the functions of a package that pass a parameter named code
// on, and the place of that parameter.
func codeTakers(files []source) map[string]int {
	takers := map[string]int{}
	note := func(name string, f *ast.FuncType) {
		place := 0
		for _, field := range f.Params.List {
			for _, p := range field.Names {
				if p.Name == "code" {
					takers[name] = place
				}
				place++
			}
		}
	}
	for _, s := range files {
		ast.Inspect(s.file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				note(n.Name.Name, n.Type)
			case *ast.AssignStmt: // bad := func(code string, ...) error
				for i, right := range n.Rhs {
					name, isName := n.Lhs[min(i, len(n.Lhs)-1)].(*ast.Ident)
					if f, ok := right.(*ast.FuncLit); ok && isName {
						note(name.Name, f.Type)
					}
				}
			}
			return true
		})
	}
	return takers
}

// collectCodes adds the codes that a file gives, with the file's name, and all
// its texts.
func collectCodes(s source, takers map[string]int, given map[string]string, literals map[string]bool) {
	add := func(e ast.Expr) {
		if text, ok := textOf(e); ok && stableCode.MatchString(text) {
			given[text] = s.name
		}
	}
	ast.Inspect(s.file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			if place, ok := codePlace(n, takers); ok && place < len(n.Args) {
				add(n.Args[place])
			}
		case *ast.ValueSpec:
			for i, name := range n.Names {
				if i < len(n.Values) && namesCode(name.Name) {
					add(n.Values[i])
				}
			}
		case *ast.KeyValueExpr:
			if key, ok := n.Key.(*ast.Ident); ok && (key.Name == "Reason" || key.Name == "Code" || key.Name == "Cause") {
				add(n.Value)
			}
		case *ast.BasicLit:
			if text, ok := textOf(n); ok {
				literals[text] = true
			}
		}
		return true
	})
}

// codePlace says which argument of a call is a code.
func codePlace(call *ast.CallExpr, takers map[string]int) (int, bool) {
	switch f := call.Fun.(type) {
	case *ast.Ident:
		place, ok := takers[f.Name]
		return place, ok
	case *ast.SelectorExpr:
		if pkg, ok := f.X.(*ast.Ident); ok && pkg.Name == "fault" {
			place, ok := faultMakers[f.Sel.Name]
			return place, ok
		}
	}
	return 0, false
}

// namesCode says whether a constant's name tells that it is a code.
func namesCode(name string) bool {
	lower := strings.ToLower(name)
	return strings.HasPrefix(lower, "code") || strings.HasPrefix(lower, "reason") || strings.HasPrefix(lower, "cause")
}

func textOf(e ast.Expr) (string, bool) {
	lit, ok := e.(*ast.BasicLit)
	if !ok || lit.Kind != token.STRING {
		return "", false
	}
	text, err := strconv.Unquote(lit.Value)
	return text, err == nil
}
