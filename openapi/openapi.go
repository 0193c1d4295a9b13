package openapi

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"path"
	"strings"
)

//go:embed openapi.json openapi.yaml
var document embed.FS

//go:embed swagger/index.html swagger/init.js swagger/swagger-ui-bundle.js.gz swagger/swagger-ui.css.gz reference.css
var assets embed.FS

// The content security policies. Swagger UI draws two of its icons from data
// addresses; nothing else differs.
const (
	policy        = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
	swaggerPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

// JSON gives the document as JSON.
func JSON() []byte {
	b, err := document.ReadFile("openapi.json")
	if err != nil {
		panic(err) // it is embedded
	}
	return b
}

// file is one thing that is served: plain, and compressed if that pays.
type file struct {
	mediaType string
	plain     []byte // nil: unpacked when a client cannot take gzip
	packed    []byte
	etag      string
}

func newFile(mediaType string, plain []byte) file {
	var packed bytes.Buffer
	zw, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	if err == nil {
		_, err = zw.Write(plain)
	}
	if err == nil {
		err = zw.Close()
	}
	if err != nil {
		panic(err) // neither level nor buffer can be wrong
	}
	return file{mediaType, plain, packed.Bytes(), etagOf(plain)}
}

func etagOf(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:8])
}

// serve answers with the file. no-cache lets browsers keep it but ask first:
// the ETag then costs no body.
func (f file) serve(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Type", f.mediaType)
	h.Set("Cache-Control", "no-cache")
	h.Set("Vary", "Accept-Encoding")
	packed := strings.Contains(r.Header.Get("Accept-Encoding"), "gzip")
	etag := `"` + f.etag + `"`
	if packed {
		etag = `"` + f.etag + `-gzip"`
		h.Set("Content-Encoding", "gzip")
	}
	h.Set("ETag", etag)
	if match := r.Header.Get("If-None-Match"); match != "" && strings.Contains(match, etag) {
		h.Del("Content-Encoding")
		w.WriteHeader(http.StatusNotModified)
		return
	}
	body := f.packed
	if !packed {
		body = f.plain
		if body == nil {
			body = unpack(f.packed)
		}
	}
	h.Set("Content-Length", fmt.Sprint(len(body)))
	if r.Method != http.MethodHead {
		_, _ = w.Write(body) // the client may be gone
	}
}

func unpack(packed []byte) []byte {
	zr, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		panic(err) // it is embedded and tested
	}
	plain, err := io.ReadAll(zr)
	if err != nil {
		panic(err)
	}
	return plain
}

// files serves a fixed set by the last part of the path.
type files struct {
	byName map[string]file
	policy string
}

func (s files) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f, ok := s.byName[lastPart(r.URL.Path)]
	if !ok {
		http.NotFound(w, r)
		return
	}
	if s.policy != "" {
		w.Header().Set("Content-Security-Policy", s.policy)
	}
	f.serve(w, r)
}

// lastPart gives the last part of a path, "" when it ends with a slash.
func lastPart(p string) string {
	_, name := path.Split(p)
	return name
}

// The servers that the document names before a base path is known.
const (
	serverJSON = `"url": "/"`
	serverYAML = "  url: /\n"
)

// Document serves openapi.json and openapi.yaml for a controller whose paths
// begin with base: "" or a slash and letters, digits and ._~-, no slash at the end.
func Document(base string) http.Handler {
	asYAML, err := document.ReadFile("openapi.yaml")
	if err != nil {
		panic(err) // it is embedded
	}
	return files{byName: map[string]file{
		"openapi.json": newFile("application/json", withServer(JSON(), serverJSON, base)),
		"openapi.yaml": newFile("application/yaml", withServer(asYAML, serverYAML, base)),
	}}
}

// withServer puts the base path into the one server that the document names.
func withServer(doc []byte, server, base string) []byte {
	if base == "" {
		return doc
	}
	return bytes.Replace(doc, []byte(server), []byte(strings.Replace(server, "/", base, 1)), 1)
}

// Swagger serves the explorer below a path that ends with a slash.
func Swagger() http.Handler {
	return files{policy: swaggerPolicy, byName: map[string]file{
		"":                     newFile("text/html; charset=utf-8", asset("swagger/index.html")),
		"init.js":              newFile("text/javascript; charset=utf-8", asset("swagger/init.js")),
		"swagger-ui.css":       packedFile("text/css; charset=utf-8", asset("swagger/swagger-ui.css.gz")),
		"swagger-ui-bundle.js": packedFile("text/javascript; charset=utf-8", asset("swagger/swagger-ui-bundle.js.gz")),
	}}
}

// packedFile keeps only the compressed form: nearly every client takes it.
func packedFile(mediaType string, packed []byte) file {
	return file{mediaType: mediaType, packed: packed, etag: etagOf(packed)}
}

func asset(name string) []byte {
	b, err := assets.ReadFile(name)
	if err != nil {
		panic(err) // it is embedded
	}
	return b
}
