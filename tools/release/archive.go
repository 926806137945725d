package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"time"
)

// pack makes a gzipped tar of files below a folder. The archive is reproducible: all files have the time of the commit
// and the owner root.
func pack(folder string, files contents, when time.Time) ([]byte, error) {
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	t := tar.NewWriter(z)
	for _, name := range files.sorted() {
		f := files[name]
		err := t.WriteHeader(&tar.Header{Format: tar.FormatUSTAR, Typeflag: tar.TypeReg, Name: folder + "/" + name,
			Size: int64(len(f.data)), Mode: f.mode, ModTime: when.UTC(), Uname: "root", Gname: "root"})
		if err != nil {
			return nil, err
		}
		if _, err := t.Write(f.data); err != nil {
			return nil, err
		}
	}
	if err := t.Close(); err != nil {
		return nil, err
	}
	if err := z.Close(); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}
