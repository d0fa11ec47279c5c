"""The floor: files, rows, public data sets, texts of people's files. At its top it imports nothing else of this
package."""
