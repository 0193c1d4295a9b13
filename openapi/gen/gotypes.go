package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
)

// field is what the Go declaration says and swag does not carry over.
type field struct {
	nullable bool   // a pointer
	optional bool   // omitempty or omitzero
	raw      bool   // json.RawMessage: any JSON value
	goType   string // without pointer
}

// types holds the fields of each struct by the name of its schema.
type types map[string]map[string]field

// readTypes parses the structs of the packages, the first one last, because its
// structs may embed those of the others.
func readTypes(root string, dirs []string) (types, error) {
	all := types{}
	for _, dir := range slices.Backward(dirs) {
		files, err := filepath.Glob(filepath.Join(root, dir, "*.go"))
		if err != nil {
			return nil, err
		}
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
			if err != nil {
				return nil, err
			}
			all.addFile(f)
		}
	}
	return all, nil
}

func (t types) addFile(f *ast.File) {
	for _, d := range f.Decls {
		decl, ok := d.(*ast.GenDecl)
		if !ok || decl.Tok != token.TYPE {
			continue
		}
		for _, s := range decl.Specs {
			spec, ok := s.(*ast.TypeSpec)
			if !ok {
				continue
			}
			if st, ok := spec.Type.(*ast.StructType); ok {
				t.add(f.Name.Name, schemaName(f, spec), st)
			}
		}
	}
}

// schemaName gives the name after @name behind the type, or package.Type.
func schemaName(f *ast.File, spec *ast.TypeSpec) string {
	for _, group := range f.Comments {
		if group.Pos() >= spec.Type.End() && group.Pos() < spec.Type.End()+3 {
			if _, name, ok := strings.Cut(group.Text(), "@name"); ok {
				return strings.TrimSpace(name)
			}
		}
	}
	return f.Name.Name + "." + spec.Name.Name
}

func (t types) add(pkg, name string, st *ast.StructType) {
	fields := map[string]field{}
	for _, f := range st.Fields.List {
		if len(f.Names) == 0 { // embedded: its fields are ours
			if sel, ok := f.Type.(*ast.SelectorExpr); ok { // of a package that was read before
				for k, v := range t[fieldOf(sel, "").goType] {
					fields[k] = v
				}
			}
			if id, ok := f.Type.(*ast.Ident); ok {
				for known, inner := range t {
					if known == pkg+"."+id.Name || known == strings.TrimSuffix(id.Name, "Body") {
						for k, v := range inner {
							fields[k] = v
						}
					}
				}
			}
			continue
		}
		tag := ""
		if f.Tag != nil {
			tag = reflect.StructTag(strings.Trim(f.Tag.Value, "`")).Get("json")
		}
		jsonName, options, _ := strings.Cut(tag, ",")
		if jsonName == "" || jsonName == "-" {
			continue
		}
		fields[jsonName] = fieldOf(f.Type, options)
	}
	t[name] = fields
}

func fieldOf(expr ast.Expr, options string) field {
	f := field{optional: strings.Contains(options, "omitempty") || strings.Contains(options, "omitzero")}
	if star, ok := expr.(*ast.StarExpr); ok {
		f.nullable, expr = true, star.X
	}
	switch e := expr.(type) {
	case *ast.SelectorExpr:
		if pkg, ok := e.X.(*ast.Ident); ok {
			f.goType = pkg.Name + "." + e.Sel.Name
		}
	case *ast.Ident:
		f.goType = e.Name
	}
	f.raw = f.goType == "json.RawMessage"
	return f
}
