package web

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"net/http"
	"path"
	"strconv"
	"strings"
)

// The chart library in static/vendor is left out until a page uses it.
//
//go:embed static/style.css static/icons.svg static/app.js static/vendor/LICENSES.txt
//go:embed static/vendor/htmx.min.js static/vendor/hx-sse.min.js
var staticFiles embed.FS

// assetCaching is a year: the name of a file changes with its content.
const assetCaching = "public, max-age=31536000, immutable"

// asset is one embedded file, compressed once at the start.
type asset struct {
	contentType string
	plain       []byte
	zipped      []byte // nil when compression does not pay
}

// assets serves the embedded files under names that carry a hash of their
// content. It does not change after it was made.
type assets struct {
	hashed map[string]string // style.css -> style.3f2a90c1.css
	files  map[string]asset  // by hashed name
}

// contentTypes lists what is embedded; anything else is a mistake.
func contentTypes() map[string]string {
	return map[string]string{
		".css": "text/css; charset=utf-8",
		".js":  "text/javascript; charset=utf-8",
		".svg": "image/svg+xml",
		".txt": "text/plain; charset=utf-8",
	}
}

func newAssets() (*assets, error) {
	a := &assets{hashed: map[string]string{}, files: map[string]asset{}}
	types := contentTypes()
	err := fs.WalkDir(staticFiles, "static", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		ext := path.Ext(name)
		if types[ext] == "" {
			return fmt.Errorf("web: %s has no content type", name)
		}
		data, err := staticFiles.ReadFile(name)
		if err != nil {
			return err
		}
		zipped, err := squeeze(data)
		if err != nil {
			return err
		}
		sum := sha256.Sum256(data)
		short := strings.TrimPrefix(name, "static/")
		hashed := strings.TrimSuffix(short, ext) + "." + hex.EncodeToString(sum[:4]) + ext
		a.hashed[short] = hashed
		a.files[hashed] = asset{contentType: types[ext], plain: data, zipped: zipped}
		return nil
	})
	return a, err
}

// squeeze compresses as well as gzip can; nil when the result is not smaller.
func squeeze(data []byte) ([]byte, error) {
	var buf bytes.Buffer
	z, err := gzip.NewWriterLevel(&buf, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	if _, err := z.Write(data); err != nil {
		return nil, err
	}
	if err := z.Close(); err != nil {
		return nil, err
	}
	if buf.Len() >= len(data) {
		return nil, nil
	}
	return buf.Bytes(), nil
}

// path gives the address of a file below the base path.
func (a *assets) path(name string) (string, error) {
	hashed, ok := a.hashed[name]
	if !ok {
		return "", fmt.Errorf("web: there is no asset %s", name)
	}
	return "/static/" + hashed, nil
}

// serve answers for one hashed name; false when there is none.
func (a *assets) serve(w http.ResponseWriter, r *http.Request, name string) bool {
	f, ok := a.files[name]
	if !ok {
		return false
	}
	h := w.Header()
	h.Set("Content-Type", f.contentType)
	h.Set("Cache-Control", assetCaching)
	h.Set("Vary", "Accept-Encoding")
	h.Set("X-Content-Type-Options", "nosniff")
	body := f.plain
	if f.zipped != nil && acceptsGzip(r) {
		h.Set("Content-Encoding", "gzip")
		body = f.zipped
	}
	h.Set("Content-Length", strconv.Itoa(len(body)))
	if r.Method != http.MethodHead {
		_, _ = w.Write(body) // the client may be gone
	}
	return true
}

// acceptsGzip reads Accept-Encoding; a quality of 0 is a refusal.
func acceptsGzip(r *http.Request) bool {
	for part := range strings.SplitSeq(r.Header.Get("Accept-Encoding"), ",") {
		name, params, _ := strings.Cut(strings.TrimSpace(part), ";")
		if name != "gzip" && name != "*" {
			continue
		}
		q, _ := strings.CutPrefix(strings.ReplaceAll(params, " ", ""), "q=")
		value, err := strconv.ParseFloat(q, 64)
		return q == "" || err == nil && value > 0
	}
	return false
}
