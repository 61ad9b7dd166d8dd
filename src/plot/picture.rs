//! Pictures as lists of marks, drawn as SVG or PNG.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Once;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontTransform, TextStyle, register_font};

use narrows_plan::printable;

use super::INK;
use crate::errors::{CommandResult, Failure, Problem};
use crate::output;

/// A place in pixels from the top left corner.
pub type Place = (i32, i32);

/// Family of all text: in SVG the viewer's own, in PNG the embedded one.
const FONT: &str = "sans-serif";

/// Percent of its size to which a page may shrink a picture.
const READABLE_PERCENT: i32 = 75;

/// Pixels of a PNG for each pixel of the picture, so that it stays sharp on dense screens.
const PNG_SCALE: i32 = 2;

/// Share of a text's size by which the library places it too high in PNG.
const PNG_TEXT_SHIFT: f64 = 0.2;

/// Estimated width of a character for the size of its text, and room at the right of texts.
const CHARACTER: f64 = 0.5;
const MARGIN: i32 = 8;

/// A picture on white paper. Texts that would end beyond its right edge make it wider.
#[derive(Clone, Debug)]
pub struct Picture {
    size: (i32, i32),
    marks: Vec<Mark>,
}

/// Form of a picture file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ImageFormat {
    Svg,
    Png,
}

#[derive(Clone, Debug)]
enum Mark {
    Path { places: Vec<Place>, colour: RGBColor, opacity: f64, width: u32 },
    Rectangle { corners: [Place; 2], colour: RGBColor },
    Disc { centre: Place, radius: i32, colour: RGBColor },
    Text { text: String, place: Place, anchor: Anchor, size: i32, is_vertical: bool },
}

/// Side of a text on which its place lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// The text begins at its place.
    Start,
    /// The text is centred over its place.
    Middle,
    /// The text ends at its place.
    End,
}

impl Anchor {
    fn position(self) -> HPos {
        match self {
            Anchor::Start => HPos::Left,
            Anchor::Middle => HPos::Center,
            Anchor::End => HPos::Right,
        }
    }
}

impl Picture {
    /// An empty picture of this width and height.
    pub fn new(size: (i32, i32)) -> Picture {
        Picture { size, marks: vec![] }
    }

    /// Width in pixels below which the texts of the picture would be hard to read.
    pub fn readable_width(&self) -> i32 {
        self.size.0 * READABLE_PERCENT / 100
    }

    /// Draws a line through places.
    pub fn path(&mut self, places: impl IntoIterator<Item = Place>, colour: RGBColor, width: u32) {
        self.faint_path(places, colour, width, 1.0);
    }

    /// Draws a line of this opacity.
    pub fn faint_path(
        &mut self,
        places: impl IntoIterator<Item = Place>,
        colour: RGBColor,
        width: u32,
        opacity: f64,
    ) {
        let places = places.into_iter().collect();
        self.marks.push(Mark::Path { places, colour, opacity, width });
    }

    /// Draws a filled rectangle between two corners.
    pub fn rectangle(&mut self, corners: [Place; 2], colour: RGBColor) {
        self.marks.push(Mark::Rectangle { corners, colour });
    }

    /// Draws a filled disc.
    pub fn disc(&mut self, centre: Place, radius: i32, colour: RGBColor) {
        self.marks.push(Mark::Disc { centre, radius, colour });
    }

    /// Draws a text whose upper edge is at `place`.
    pub fn text(&mut self, text: impl Into<String>, place: Place, anchor: Anchor, size: i32) {
        let text = drawable(text.into());
        let width = (CHARACTER * f64::from(size) * text.chars().count() as f64) as i32;
        let right = match anchor {
            Anchor::Start => place.0 + width,
            Anchor::Middle => place.0 + width / 2,
            Anchor::End => place.0,
        };
        if !text.is_empty() {
            self.size.0 = self.size.0.max(right + MARGIN);
        }
        self.marks.push(Mark::Text { text, place, anchor, size, is_vertical: false });
    }

    /// Draws a text from bottom to top, centred at `place`.
    pub fn vertical_text(&mut self, text: impl Into<String>, place: Place, size: i32) {
        let (text, anchor) = (drawable(text.into()), Anchor::Middle);
        self.marks.push(Mark::Text { text, place, anchor, size, is_vertical: true });
    }

    /// This picture with another one below.
    pub fn above(mut self, other: Picture) -> Picture {
        let lower = |(x, y): Place| (x, y + self.size.1);
        self.marks.extend(other.marks.into_iter().map(|mark| match mark {
            Mark::Path { places, colour, opacity, width } => {
                let places = places.into_iter().map(lower).collect();
                Mark::Path { places, colour, opacity, width }
            }
            Mark::Rectangle { corners, colour } => {
                Mark::Rectangle { corners: corners.map(lower), colour }
            }
            Mark::Disc { centre, radius, colour } => {
                Mark::Disc { centre: lower(centre), radius, colour }
            }
            Mark::Text { text, place, anchor, size, is_vertical } => {
                Mark::Text { text, place: lower(place), anchor, size, is_vertical }
            }
        }));
        self.size = (self.size.0.max(other.size.0), self.size.1 + other.size.1);
        self
    }

    /// The picture as SVG.
    ///
    /// # Errors
    /// The drawing library failed.
    pub fn svg(&self) -> CommandResult<String> {
        let mut text = String::new();
        let size = (self.size.0 as u32, self.size.1 as u32);
        self.draw(&SVGBackend::with_string(&mut text, size).into_drawing_area(), 1)
            .map_err(draw_failure)?;
        Ok(text)
    }

    /// Writes the picture as SVG or PNG, by the ending of the file's name.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, file: &Path) -> CommandResult<()> {
        match ImageFormat::of(file) {
            Some(ImageFormat::Png) => output::write_file(file, &self.png().map_err(draw_failure)?),
            _ => output::write_file(file, self.svg()?.as_bytes()),
        }
    }

    fn png(&self) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(|| {
            // Text is left out of the picture if the embedded font cannot be read.
            let _ = register_font(FONT, FontStyle::Normal, dejavu::sans::regular());
        });
        let (width, height) = (self.size.0 * PNG_SCALE, self.size.1 * PNG_SCALE);
        let (width, height) = (width as u32, height as u32);
        let mut pixels = vec![0; 3 * width as usize * height as usize];
        let canvas = BitMapBackend::with_buffer(&mut pixels, (width, height)).into_drawing_area();
        self.draw(&canvas, PNG_SCALE)?;
        drop(canvas);
        let mut png = vec![];
        let mut encoder = png::Encoder::new(&mut png, width, height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.write_header()?.write_image_data(&pixels)?;
        Ok(png)
    }

    fn draw<B: DrawingBackend>(
        &self,
        canvas: &DrawingArea<B, Shift>,
        scale: i32,
    ) -> Result<(), Box<dyn std::error::Error>>
    where
        B::ErrorType: 'static,
    {
        canvas.fill(&WHITE)?;
        let scaled = |(x, y): Place| (x * scale, y * scale);
        for mark in &self.marks {
            match mark {
                Mark::Path { places, colour, opacity, width } => {
                    let style = colour.mix(*opacity).stroke_width(width * scale as u32);
                    let places: Vec<Place> = places.iter().copied().map(scaled).collect();
                    canvas.draw(&PathElement::new(places, style))?;
                }
                Mark::Rectangle { corners, colour } => {
                    canvas.draw(&Rectangle::new(corners.map(scaled), colour.filled()))?;
                }
                Mark::Disc { centre, radius, colour } => {
                    let disc = Circle::new(scaled(*centre), radius * scale, colour.filled());
                    canvas.draw(&disc)?;
                }
                Mark::Text { text, place, anchor, size, is_vertical } => {
                    let position = Pos::new(anchor.position(), VPos::Top);
                    let style: TextStyle = (FONT, size * scale).into_font().color(&INK);
                    let style = style.pos(position);
                    let style = match is_vertical {
                        true => style.transform(FontTransform::Rotate270),
                        false => style,
                    };
                    let (x, y) = scaled(*place);
                    let shift = if scale == PNG_SCALE { PNG_TEXT_SHIFT } else { 0.0 };
                    let shift = (shift * f64::from(size * scale)).round() as i32;
                    let place = if *is_vertical { (x + shift, y) } else { (x, y + shift) };
                    canvas.draw_text(text, &style, place)?;
                }
            }
        }
        canvas.present()?;
        Ok(())
    }
}

impl ImageFormat {
    fn of(file: &Path) -> Option<ImageFormat> {
        match file.extension().and_then(OsStr::to_str).map(str::to_lowercase).as_deref() {
            Some("svg") => Some(ImageFormat::Svg),
            Some("png") => Some(ImageFormat::Png),
            _ => None,
        }
    }
}

/// A text without the characters that XML does not allow, which names in files may have.
fn drawable(text: String) -> String {
    printable(&text).replace(['\u{fffe}', '\u{ffff}'], "\u{fffd}")
}

/// Checks that a picture can be written to the file of a flag, before a long computation.
///
/// # Errors
/// A name without a known ending, and a file that cannot be written.
pub fn check_picture_file(flag: &str, file: &Path) -> CommandResult<()> {
    if ImageFormat::of(file).is_none() {
        let message = format!("`{}` ends in neither .svg nor .png", file.display());
        let [svg, png] = ["svg", "png"].map(|ending| file.with_extension(ending));
        let hint = format!("{} or {}", svg.display(), png.display());
        return Err(Failure::input(Problem::new(flag, message).hint(hint)));
    }
    output::check_writable(file)
}

fn draw_failure(error: Box<dyn std::error::Error>) -> Failure {
    Failure::failed(vec![Problem::new("", format!("the picture cannot be drawn: {error}"))])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture() -> Picture {
        let mut picture = Picture::new((120, 60));
        picture.path([(0, 0), (120, 60)], INK, 2);
        picture.rectangle([(10, 10), (30, 20)], super::super::PALETTE[0]);
        picture.disc((60, 30), 4, super::super::PALETTE[1]);
        picture.text("a < b", (4, 40), Anchor::Start, 12);
        picture
    }

    #[test]
    fn texts_are_escaped_in_svg() {
        let svg = picture().svg().unwrap();
        assert!(svg.contains("a &lt; b") && svg.contains("<circle"), "{svg}");
    }

    #[test]
    fn control_characters_are_escaped() {
        let mut picture = picture();
        picture.text("\u{1b}[31m\u{1}\u{ffff}", (0, 0), Anchor::Start, 12);
        picture.vertical_text("a\u{8}", (0, 0), 12);
        let svg = picture.svg().unwrap();
        let is_allowed = |c: char| c == '\n' || !c.is_control() && c != '\u{ffff}';
        assert!(svg.chars().all(is_allowed) && svg.contains("\\u{1b}[31m"), "{svg}");
    }

    #[test]
    fn text_is_drawn_in_png() {
        let decoded = |picture: &Picture| {
            let png = picture.png().unwrap();
            let mut reader = png::Decoder::new(std::io::Cursor::new(png)).read_info().unwrap();
            let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
            reader.next_frame(&mut pixels).unwrap();
            pixels
        };
        let with_text = picture();
        let mut without = with_text.clone();
        without.marks.pop();
        let differs = |(a, b): (&u8, &u8)| a != b;
        let (with_text, without) = (decoded(&with_text), decoded(&without));
        assert_eq!(with_text.len(), 3 * 240 * 120);
        assert!(with_text.iter().zip(&without).filter(|pair| differs(*pair)).count() > 100);
    }

    #[test]
    fn long_texts_make_a_picture_wider() {
        let width = |text: &str, anchor| {
            let mut picture = Picture::new((120, 60));
            picture.text(text, (60, 20), anchor, 10);
            picture.size.0
        };
        assert_eq!(width("short", Anchor::Start), 120);
        assert_eq!(width(&"long ".repeat(20), Anchor::Start), 60 + 500 + MARGIN);
        assert_eq!(width(&"long ".repeat(20), Anchor::Middle), 60 + 250 + MARGIN);
        assert_eq!(width(&"long ".repeat(20), Anchor::End), 120);
    }

    #[test]
    fn files_are_svg_or_png() {
        for (name, expected) in [("a.svg", true), ("b.PNG", true), ("c.pdf", false), ("d", false)] {
            assert_eq!(ImageFormat::of(Path::new(name)).is_some(), expected, "{name}");
        }
    }
}
